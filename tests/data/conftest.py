"""Gives every data test its own cache folder."""

import pytest


@pytest.fixture(autouse=True)
def cache_folder(tmp_path, monkeypatch):
    folder = tmp_path / "cache"
    monkeypatch.setenv("NARROWGAUGE_CACHE", str(folder))
    return folder
