"""Every way to fail at a plug-in or its options: each names it, says what to do, and no secret."""

from __future__ import annotations

import json
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from pipegrad.errors import (
    ConfigError,
    PluginError,
    PluginNotFoundError,
    PluginOptionError,
)
from pipegrad.plugins.registry import REDACTED, complaints_of, redacted
from pipegrad.train.config import Config
from pipegrad.train.job import Job
from pipegrad.train.report import manifest_of
from pipegrad.train.reporters.reporter import reporters
from pipegrad.train.reporters.terminal import Terminal
from pipegrad.train.schema import Model, Named, Train
from tests.support.plugins import (
    ACME,
    BROKEN,
    GROUP,
    HERE,
    Greedy,
    Handlers,
    Install,
    Local,
    Plain,
    Unfinished,
    acme,
)
from tests.unit.train.test_report import metrics, running


def test_an_unknown_name_lists_the_known_ones_closest_first(
    install: Install, registry: Handlers
) -> None:
    with pytest.raises(PluginNotFoundError, match="known, closest first: none"):
        registry.resolve("anything")
    names = ("expert", "noop", "data-parallel", "sharded")
    acme(install, **dict.fromkeys(names, "acme:Sum"))
    with pytest.raises(PluginNotFoundError) as caught:
        registry.resolve("shraded")
    known = "closest first: sharded, data-parallel, expert, noop. Install the distribution that"
    assert f"no plug-in of group '{GROUP}' is called 'shraded'; known, {known}" in str(caught.value)
    # An unknown distribution is not imported as a module.
    with pytest.raises(PluginNotFoundError, match="closest first: acme-handlers::noop"):
        registry.resolve("acme-handler::noop")


def test_a_broken_plugin_fails_only_when_selected_and_names_itself(
    install: Install, registry: Handlers
) -> None:
    acme(install)
    install("rusty", version="0.9", entry_points={"rust": "rusty:H"}, modules={"rusty": BROKEN})
    assert registry.resolve("acme-sum").distribution == "acme-handlers"
    with pytest.raises(PluginError, match=r"'rust' \(rusty:H, rusty 0\.9\)") as caught:
        registry.resolve("rust")
    assert repr(caught.value.__cause__) == "RuntimeError('the driver is too old')"
    assert registry.resolve("acme-sum").distribution == "acme-handlers"


@pytest.mark.parametrize(
    ("value", "cause"),
    [
        ("acme:Absent", AttributeError),
        ("syntax_error:Sum", SyntaxError),
        ("not a value", Exception),
    ],
)
def test_every_way_not_to_load(
    install: Install, registry: Handlers, value: str, cause: type[Exception]
) -> None:
    modules = {"acme": ACME, "syntax_error": "def"}
    install("acme-handlers", entry_points={"bad": value}, modules=modules)
    with pytest.raises(PluginError, match=f"'bad' .{value}, acme-handlers 1.0") as caught:
        registry.resolve("bad")
    assert isinstance(caught.value.__cause__, cause)


@pytest.mark.parametrize("value", ["acme:Outer", "acme:__name__", "acme"])
def test_what_is_loaded_must_be_a_handler(install: Install, registry: Handlers, value: str) -> None:
    acme(install, wrong=value)
    expected = (
        rf"'wrong' \({value}, acme-handlers 2\.5\).*pipegrad\.plugins\.handler:GradientHandler"
    )
    with pytest.raises(PluginError, match=expected):
        registry.resolve("wrong")


def test_what_is_given_must_be_a_finished_handler(registry: Handlers) -> None:
    spec: object
    for spec in 3, int, len, {"name": Plain()}, None:
        with pytest.raises(PluginError, match="expected a concrete subclass of"):
            registry.resolve(spec)  # type: ignore[arg-type]
    with pytest.raises(PluginError, match=r"Unfinished.* lacks reductions\(\)"):
        registry.resolve(Unfinished)


def test_options_must_be_those_of_the_constructor(registry: Handlers) -> None:
    with pytest.raises(PluginOptionError) as caught:
        registry.resolve({"name": Local, "axs": "dp"})
    assert str(caught.value) == (
        f"plug-in '{HERE}:Local' ({HERE}:Local, of no distribution) has no option 'axs', needs the "
        "option 'axis'; allowed, closest first: axis, scale"
    )
    resolved = registry.resolve({"name": Greedy, "anything": 1})  # it may take any option
    assert resolved.options == (("anything", "1"),)
    with pytest.raises(PluginOptionError, match=r"\{'axis': 'dp'\} lacks 'name'"):
        registry.resolve({"axis": "dp"})


def test_a_refusal_by_the_constructor_names_the_plugin(
    install: Install, registry: Handlers
) -> None:
    refusing = ACME + "\nclass Picky(Sum):\n    def __init__(self, *, scale):\n        1 / scale\n"
    install("picky", version="3.1", entry_points={"p": "picky:Picky"}, modules={"picky": refusing})
    refusal = r"'p' \(picky:Picky, picky 3\.1\).*'scale': 0"
    with pytest.raises(PluginOptionError, match=refusal) as caught:
        registry.resolve({"name": "p", "scale": 0})
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def plain(model: object, *, width: int, depth: int = 2) -> None: ...


def open_to_all(model: object, width: int = 3, **others: object) -> None: ...


@pytest.mark.parametrize(
    ("function", "options", "given", "expected"),
    [
        (plain, ["width"], ["model"], ""),
        (plain, [], ["model"], "needs the option 'width'; allowed, closest first: width, depth"),
        (plain, ["widht"], ["model"], "has no option 'widht', needs the option 'width'; allowed"),
        (plain, ["width", "model"], ["model"], "has no option 'model'; allowed"),
        (plain, ["width"], [], "needs the option 'model'; allowed"),
        (open_to_all, ["anything"], ["model"], ""),
        (open_to_all, ["model"], ["model"], "has no option 'model'"),
        (max, ["x"], [], ""),
        (list, ["x"], [], "has no option 'x'; allowed, closest first: none"),
    ],
)
def test_complaints(
    function: Callable[..., object], options: list[str], given: list[str], expected: str
) -> None:
    found = complaints_of(function, options, given=given)
    assert found.startswith(expected)
    assert bool(found) == bool(expected)


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


def test_no_message_has_it() -> None:
    assert config(token=SECRET).train.reporters[0].options == {"token": SECRET}
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
