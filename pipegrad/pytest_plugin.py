"""The plug-in of pytest, by the name that it had: for `-p` and for installations made before."""

from pipegrad_pytest import audit_pipeline as audit_pipeline
from pipegrad_pytest import pytest_addoption as pytest_addoption
from pipegrad_pytest import pytest_collection_modifyitems as pytest_collection_modifyitems
