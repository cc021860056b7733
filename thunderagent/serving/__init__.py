"""What starts the proxy: built from the configuration, run in one process, read anew, ended."""
