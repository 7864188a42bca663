"""The page that shows a report's facts."""
