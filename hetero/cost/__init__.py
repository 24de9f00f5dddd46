"""What machines are and cost, and what a job on them gains."""
