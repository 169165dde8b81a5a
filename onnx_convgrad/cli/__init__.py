"""The command line: one module per command, its options, tables and plots. `command` prints the errors that are raised."""
