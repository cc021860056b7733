"""Starting and ending replicas: the interface (`base.py`), one file for each driver, and when (`manager.py`)."""
