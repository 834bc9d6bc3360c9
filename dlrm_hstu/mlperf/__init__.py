"""MLPerf Training 6.1, benchmark dlrmv4: the rules as numbers, and the run's log. Imports no torch."""
