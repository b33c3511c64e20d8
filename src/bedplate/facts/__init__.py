"""What is true before any choice: hardware, models, workloads."""
