"""The command: one file per verb, and nothing heavy is imported before a verb runs."""
