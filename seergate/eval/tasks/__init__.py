"""Tasks: problems, and how answers are asked for and graded."""
