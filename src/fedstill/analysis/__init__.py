"""Reading runs, grouping them, their tables and figures: for the command line and for notebooks alike."""
