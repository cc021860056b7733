"""Running the proxy: built from the configuration, run in one process, reloaded, ended."""
