from bract.report.outcome import QuestionOutcome as QuestionOutcome
from bract.report.outcome import RunOutcome as RunOutcome
from bract.report.outcome import run_outcome as run_outcome
from bract.report.page.render import write_report as write_report
