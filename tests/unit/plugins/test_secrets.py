"""What is secret among the options of a plug-in is in no manifest and in no message."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest

from pipegrad.errors import ConfigError, PluginOptionError
from pipegrad.plugins.secrets import REDACTED, redacted
from pipegrad.train.config import Config
from pipegrad.train.job import Job
from pipegrad.train.reporters.reporter import reporters
from pipegrad.train.reporters.terminal import Terminal
from pipegrad.train.run import manifest_of
from pipegrad.train.schema import Model, Named, Train
from tests.unit.train.test_report import metrics, running

SECRET = "hunter2"


class Failing(Terminal):
    def __init__(self, *, token: str) -> None:
        raise ValueError("no service")


def config(**options: object) -> Config:
    named = Named(name="jsonl", **options)
    return Config(model=Model(factory="a:b"), train=Train(reporters=[named]))


@pytest.mark.parametrize(
    "name",
    ["token", "api_key", "apiKey", "API_KEY", "password", "db-password", "client_secret", "auth"],
)
def test_an_option_is_secret_if_a_word_of_its_name_says_so(name: str) -> None:
    """Security, F9. It was in manifest.json, for all to read."""
    text = json.dumps(manifest_of(config(**{name: SECRET}), {}))
    assert SECRET not in text
    assert json.loads(text)["config"]["train"]["reporters"][0][name] == REDACTED


def test_other_options_are_not_and_the_rest_of_a_url_is_kept() -> None:
    data = {"sample_tokens": 8, "keyboard": "x", "monkey": 1, "tokenizer": "a.json", "key": None}
    assert redacted(data) == data
    urls = {"urls": ["https://me:hunter2@host/a?b=c@d", "mail me@host", "s3://bucket/a@b"]}
    assert redacted(urls) == {
        "urls": [f"https://{REDACTED}@host/a?b=c@d", "mail me@host", "s3://bucket/a@b"]
    }
    assert redacted({"credentials": {"user": "me"}}) == {"credentials": REDACTED}


def test_the_configuration_itself_and_its_type_stay() -> None:
    assert config(token=SECRET).train.reporters[0].options == {"token": SECRET}


def test_no_message_has_it() -> None:
    with pytest.raises(ConfigError) as refused:
        Job(config(token=SECRET), 1)  # jsonl takes no option
    assert SECRET not in str(refused.value)
    with pytest.raises(PluginOptionError) as failed:
        reporters.resolve({"name": Failing, "token": SECRET})
    assert f"cannot be constructed with {{'token': '{REDACTED}'}}" in str(failed.value)


def test_the_manifest_is_for_who_made_it(tmp_path: Path) -> None:
    """Security, F9."""
    with running(tmp_path, "jsonl") as (run, _):
        run.step(metrics(1))
    assert stat.S_IMODE((tmp_path / "manifest.json").stat().st_mode) == 0o600
