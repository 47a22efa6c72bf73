"""The plug-in of pytest, by the name that it had: for `-p` and for installations made before."""

from pipegrad_pytest import audit_pipeline, pytest_addoption, pytest_collection_modifyitems

__all__ = ["audit_pipeline", "pytest_addoption", "pytest_collection_modifyitems"]
