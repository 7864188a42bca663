from bract.audit.questions.base import QUESTIONS as QUESTIONS
from bract.audit.questions.base import Question as Question
from bract.audit.questions.rule import Decision as Decision
from bract.audit.questions.rule import Need as Need
from bract.audit.questions.rule import Rule as Rule
from bract.audit.results import Batch as Batch
