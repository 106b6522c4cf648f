"""Methods by name and as values: when two are equal, and what the registry takes and refuses."""

import copy
import re
import sys
import warnings
from dataclasses import dataclass, field, fields, replace
from typing import ClassVar

import numpy as np
import pytest
import torch

import seergate
from seergate import DecodeConfig, GateBank, GateConfig, SeergateError, methods
from seergate.config import SCORERS, is_retention
from seergate.methods import LayerSpec, registry
from tests.support.evictors import centres
from tests.support.models import tiny_model
from tests.support.naive_views import retention_for
from tests.support.running import invalid, output_of, refused


@pytest.fixture
def known():
    """The registry, as it was again after the test."""
    before = dict(methods.METHODS)
    yield
    methods.METHODS.clear()
    methods.METHODS.update(before)


def made(name, model, bank):
    options = {"tri_attention": {"centres": centres(model)}, "reason_cache": {"structural_check": False}}
    options["random_sharing"] = options["reason_cache"]
    if is_retention(name):
        bank = retention_for(model, name)
    return methods.make_method(name, bank=bank if methods.has_gates(name) else None, **options.get(name, {}))


def test_methods_with_the_same_options_are_equal(model):
    """A cache goes on under an equal method, also another object that was made by name once more; under no other."""
    bank = GateBank.for_model(model, GateConfig(8, 16))
    for name in methods.METHODS:
        one, two = made(name, model, bank), made(name, model, bank)
        assert one is not two and one == two, name
        assert made("quest" if name == "oracle" else "oracle", model, bank) != one
        if "token_budget" in {f.name for f in fields(one)}:
            two.token_budget = 5000
            assert one != two, name


WRONG = {"bool": ("yes", 1), "int": (-1, 0.5, True, "x"), "float": (-0.1, "x", True), "str": ("nonsense", 3)}
"""Type of an option -> values that it must not have."""
RIGHT = {("seed", -1), ("border", "nonsense")}
"""Options of which one of these is a good value."""


def test_every_option_is_checked(model):
    """A number out of range, a word that nobody knows, another type: the error names the option and the value."""
    bank = GateBank.for_model(model, GateConfig(8, 16))
    for name in methods.METHODS:
        method = made(name, model, bank)
        for option in fields(method):
            rules = ("threshold", "top_p", "budget_share")
            other = {"token_budget": None} if option.name in rules and name != "raas" else {}
            for value in WRONG.get(str(option.type).split(" ")[0], ()):
                if option.init and (option.name, value) not in RIGHT:
                    named = f"{option.name.removeprefix('rectify_')} is {value!r}"
                    with pytest.raises(ValueError, match=f"{named}|resa reads a share|random has no prob"):
                        replace(method, **{**other, option.name: value})


def test_refusals():
    bank = GateBank.for_model(tiny_model("qwen3"), GateConfig(8, 16))
    for attempt, message in (
        (lambda: methods.Quest(token_budget=15, block_size=16), "token_budget is 15; with block_size 16"),
        (lambda: methods.Quest(token_budget=31, block_size=16), "token_budget is 31; .* at least 32, as one"),
        (lambda: methods.Gate(bank=bank, token_budget=15), "token_budget is 15; with block_size 8 .* at least 16"),
        (lambda: methods.StreamingLLM(token_budget=4), "token_budget is 4; it must be greater than sink_tokens"),
        (lambda: methods.make_method("snap_kv"), "there is no method 'snap_kv'"),
        (lambda: seergate.attach(tiny_model("qwen3"), "my-gates"), "'my-gates'; .*; gates are named by a directory"),
        (lambda: seergate.attach(tiny_model("qwen3"), bank, block_size=16), "gates have the block size that"),
        (lambda: methods.Gate(bank=None), "bank is a NoneType; it must be a GateBank"),
        (lambda: methods.Gate(bank=bank, block_size=64), "block_size is 64.*blocks of 8"),
        (lambda: DecodeConfig(dense_layers=3), "dense_layers is 3"),
        (lambda: DecodeConfig(top_p=0.9, compat="published"), "neither budget_share nor top_p.*or pass compat=None"),
        (lambda: DecodeConfig(compat="publishd"), "compat is 'publishd'"),
        (lambda: GateConfig(k_pooling=None), "k_pooling is None"),
        (lambda: GateConfig(k_pooling=[["max"]]), "k_pooling is"),
        (lambda: seergate.attach(tiny_model("qwen3"), "oracle", dense_layers=(99,)), r"dense_layers names \[99\]"),
        (lambda: seergate.attach(tiny_model("qwen3"), "quest", DecodeConfig()), "goes with gates"),
        (lambda: DecodeConfig(dense_below=-1), "dense_below is -1; it must be a whole number, 0 or greater"),
        (lambda: DecodeConfig(dense_below=8, compat="published"), "nor dense_below"),
        (lambda: methods.H2O(token_budget=8, recent_tokens=9), "token_budget is 8; it must be at least recent_tokens"),
        (lambda: methods.KV4Bit(group=1), "group is 1; it must be a whole number, 2 or greater"),
        (lambda: methods.LazyEviction(token_budget=9, window=10), "token_budget is 9; it must be at least window"),
        (lambda: methods.LazyEviction(alpha=2), "alpha is 2"),
        (lambda: methods.make_method("lazy_eviction", interval=3), "no option 'interval'"),
        (lambda: methods.SnapKV(token_budget=16), r"at least window \(32\)"),
        (lambda: methods.SnapKV(kernel=4), "kernel is 4; it must be odd"),
        (lambda: methods.RKV(importance_weight=1.5), "importance_weight is 1.5"),
        (lambda: methods.RPC(interval=2), "interval is 2; it must be at least ratio"),
        (lambda: methods.RaaS(token_budget=15), "token_budget is 15; it must be a whole number, 16 or greater"),
        (lambda: methods.TriAttention(centres=3), "centres is a int"),
        (lambda: methods.make_method("tri_attention"), "needs centres="),
        (lambda: methods.Quest(min_pages=3, threshold=0.1), "min_pages is 3 without a token budget"),
        (lambda: methods.Quest(token_budget=16, min_pages=3, sink_blocks=2), "2 sink blocks it must be at least 64"),
        (lambda: methods.LazyEviction(use_h1=False, use_h2=False), "use_h1 and use_h2 are both False"),
        (lambda: methods.SnapKV(compress="prompt", prompt="pinned"), "then it must be 'evictable'"),
        (lambda: methods.ReSA(share=1.5), "share is 1.5; it must be a number in 0..1"),
        (lambda: methods.ReSA(threshold=0.1), "it has no other rule"),
        (lambda: methods.Random(threshold=0.1), "random has no probabilities of blocks"),
        (lambda: methods.Random(top_p=0.9), "random has no probabilities of blocks"),
    ):
        invalid(message, attempt)


def test_gates_are_equal_if_their_weights_are(model):
    bank = GateBank.for_model(model, GateConfig(8, 16))
    gate, same = (methods.Gate(bank=b, token_budget=64) for b in (bank, copy.deepcopy(bank)))
    assert gate == same and gate != methods.Gate(bank=bank, token_budget=72)
    evictors = [methods.GateOnEvictor(evictor=methods.H2O(), gate=g) for g in (gate, same)]
    assert evictors[0] == evictors[1]
    with torch.no_grad():
        same.bank.gate(1).k_proj.weight[0, 0] += 1
    assert gate != same and evictors[0] != evictors[1]
    assert gate != methods.Gate(bank=copy.deepcopy(bank).to(torch.bfloat16), token_budget=64)


@pytest.mark.parametrize("scorer", ["attn_gate", *filter(is_retention, SCORERS)])
def test_a_layer_on_another_device_leaves_the_bank_where_it_is(scorer):
    """One bank serves models on two devices: the second takes a copy, and each of its caches the weights of now."""
    bank = GateBank.for_model(tiny_model("qwen3"), GateConfig(8, 16, scorer=scorer))
    method = methods.make_method("gate" if scorer == "attn_gate" else scorer, bank=bank, token_budget=64)
    here, there = (LayerSpec(0, 1, 4, 2, 16, torch.float32, torch.device(d), None) for d in ("cpu", "meta"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that nothing can be copied to a meta tensor
        elsewhere, again = method.new_state(there), method.new_state(there)
    assert {parameter.device.type for parameter in elsewhere.gate.parameters()} == {"meta"}
    assert all(parameter.device.type == "cpu" for parameter in bank.parameters())
    assert method.new_state(here).gate is bank.layers["0"]
    assert again.gate is elsewhere.gate, "its address stays"


@dataclass(kw_only=True)
class Mine(methods.Oracle):
    name: ClassVar[str] = "mine"


@pytest.mark.usefixtures("known")
def test_registering():
    assert methods.register(Mine) is Mine and methods.register(Mine) is Mine
    assert methods.make_method("mine", token_budget=128) == Mine(token_budget=128)

    class Other(methods.Quest):
        name = "mine"

    for kind, message in (
        (Other, "'mine' is the name of .*Mine already"),
        (int, "<class 'int'> is no method"),
        (type("Idle", (methods.SelectingMethod,), {"name": "idle"}), "Idle has no states; it must name their class"),
        (type("Odd", (methods.Quest,), {"name": "a:b"}), r"Odd.name is 'a:b'; it must be of letters"),
        (type("Plain", (methods.Quest,), {"name": "plain", "block_size": 8}), "Plain sets block_size to 8, which has"),
        (type("Two", (methods.Quest,), {"name": "two", "calibrates": {"a": "m:A", "b": "m:B"}}), "calibrates a, b"),
    ):
        refused(message, methods.register, kind)


@pytest.mark.parametrize("kind", [np.int64, np.float32, torch.tensor])
def test_numbers_of_numpy_and_pytorch_are_options(kind):
    options = {"threshold": kind(0.25)} if kind is np.float32 else {"token_budget": kind(128)}
    model = tiny_model("qwen3")
    for method in (methods.make_method("quest", **options), seergate.attach(model, "quest", **options).method):
        number = method.threshold or method.token_budget
        assert number in (0.25, 128) and type(number) in (int, float)
    with pytest.raises(ValueError, match="it must be .*, and a number of Python's own"):
        methods.Quest(**options)


def test_a_default_without_effect_is_refused():
    """In a class that is no dataclass, or without a type: its objects would have the default of the base class."""

    class Undecorated(methods.H2O):
        interval: int = 4

    @dataclass(kw_only=True)
    class Untyped(methods.H2O):
        interval = 4

    @dataclass(kw_only=True, slots=True)
    class Right(methods.H2O):
        interval: int = 4
        dense_layers: tuple[int, ...] = field(default_factory=lambda: (1,))

    model = tiny_model("qwen3")
    for kind in (Undecorated, Untyped):
        with pytest.raises(SeergateError, match=rf"{kind.__name__} sets interval to 4, .*: interval: int = 4"):
            seergate.attach(model, kind())
    with seergate.attached(model, Right()) as handle:
        assert handle.method.interval == 4


@pytest.mark.usefixtures("known")
def test_subclasses_of_gate_are_gates():
    @methods.register
    @dataclass(kw_only=True)
    class Sharper(methods.Gate):
        name: ClassVar[str] = "sharper"
        power: float = 2.0

    bank = GateBank.for_model(tiny_model("qwen3"), GateConfig(8, 16))
    method = methods.make_method("sharper", bank=bank, token_budget=64, power=3.0)
    assert (method.power, method.token_budget, method.block_size) == (3.0, 64, 8)
    refused("'sharper' needs gates", methods.make_method, "sharper")


@pytest.mark.usefixtures("known")
def test_plugins(tmp_path, monkeypatch):
    """By the environment variable that worker processes inherit, and by the entry points of installed packages."""
    text = "from tests.methods.test_registry import Mine\nfrom seergate import methods\nmethods.register(Mine)\n"
    (tmp_path / "registers_mine.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    refused("there is no method 'mine'", methods.method_class, "mine")
    monkeypatch.setenv(registry.PLUGINS, "seergate, registers_mine")
    assert "\nmine: " in output_of("methods")
    del methods.METHODS["mine"], sys.modules["registers_mine"]
    assert methods.method_class("mine").__name__ == "Mine"
    for name in ("not_there", "registers_mine.py", "./registers_mine.py", str(tmp_path / "registers_mine"), ""):
        refused(f"there is no module '{re.escape(name)}' to load", methods.load_plugins, name)
    (tmp_path / "my-methods.py").touch()
    methods.load_plugins("my-methods")
    (tmp_path / "broken.py").write_text("import not_there_at_all\n")
    with pytest.raises(ModuleNotFoundError, match="not_there_at_all"):
        methods.load_plugins("broken")

    del methods.METHODS["mine"]
    monkeypatch.delenv(registry.PLUGINS)
    package = tmp_path / "theirs-1.0.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: theirs\nVersion: 1.0\n")
    text = "[seergate.methods]\nbroken = broken:Theirs\nmine = tests.methods.test_registry:Mine\n"
    (package / "entry_points.txt").write_text(text)
    sys.path.append(str(tmp_path))
    told = "the method 'broken' of an installed package, broken:Theirs, cannot be used: No module named 'not_there_at"
    with pytest.warns(UserWarning, match=told):
        assert methods.method_class("mine") is Mine
    with pytest.warns(UserWarning, match=told), pytest.raises(SeergateError, match=told):
        methods.method_class("broken")


def test_a_method_has_one_set_of_options():
    """A method says of itself what its rule has made of its options; at least so many pages are a derived bound."""
    quest = methods.Quest(token_budget=32, min_pages=3, dense_layers=[0, 1])
    assert (quest.token_budget, quest.nominal, quest.budget, quest.covered_tokens) == (32, "32", 48, 48)
    assert quest.dense_layers == (0, 1) and quest == methods.Quest(token_budget=32, min_pages=3)
    quest.token_budget = 64
    assert quest.budget == quest.covered_tokens == 64
    assert methods.Quest().token_budget == 4096 and methods.Oracle(top_p=0.5).budget is None
    bank = GateBank.for_model(tiny_model("qwen3"), GateConfig(8, 16))
    bank.decode_defaults = {"compat": "published"}
    invalid('compat is "published", whose code has neither budget_share nor top_p', methods.Gate, bank=bank, top_p=0.5)
    assert methods.Gate(bank=bank, token_budget=64).covered_tokens == -1
