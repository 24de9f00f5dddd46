"""What the hosts of a job are and cost."""
