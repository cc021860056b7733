"""Start and end replicas: who does it (`base.py`), one file for each way, and when (`manager.py`)."""
