"""What is written of a record for people: tables, verdicts on the paper's questions, the page."""
