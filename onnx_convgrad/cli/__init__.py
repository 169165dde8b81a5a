"""The command line: one module per command, its options, tables and plots."""
