"""End-to-end: every wrong call of a public name is one line of WherewhatError that names what is wrong."""

from __future__ import annotations

import io
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    LlamaForCausalLM,
    LlamaModel,
    MambaConfig,
    MambaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTModel,
)

import wherewhat
from helpers.models import save_model
from wherewhat.errors import WherewhatError
from wherewhat.report.report import make_report
from wherewhat.report.result import Result
from wherewhat.runs.directory import RunDirectory
from wherewhat.runs.request import ModelRequest, Request
from wherewhat.text.documents import Document

IDS = torch.arange(16)[None] % 13


@dataclass(frozen=True)
class Here:
    """What calls are made on."""

    folder: Path
    loaded: Any
    result: Result
    tmp: Path

    @property
    def model(self) -> Any:
        return self.loaded.model

    def request(self, **changes: Any) -> Request:
        given = {"measurement": "axes", "model": str(self.folder), "files": str(self.tmp / "text.txt"), "tokens": 24}
        return Request(**(given | changes))

    def run(self, request: Any, **changes: Any) -> Result:
        return wherewhat.run(request, **({"out": self.tmp / "runs"} | changes))


@pytest.fixture(scope="module")
def here(tmp_path_factory) -> Here:
    tmp = tmp_path_factory.mktemp("wrong")
    folder = save_model(tmp / "tiny")
    (tmp / "text.txt").write_text("the cat sat on a mat and the dog ran " * 3)
    made = Here(folder, wherewhat.load(folder), None, tmp)
    return Here(folder, made.loaded, made.run(made.request()), tmp)


def t5():
    sizes = {"vocab_size": 32, "d_model": 16, "d_kv": 4, "d_ff": 16, "num_layers": 1, "num_heads": 4}
    return T5ForConditionalGeneration(T5Config(**sizes)).eval()


def on_meta(model):
    with torch.device("meta"):
        return LlamaForCausalLM(model.config).eval()


def vit():
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    return ViTModel(ViTConfig(**sizes, image_size=32)).eval()


def mamba():
    return MambaForCausalLM(MambaConfig(vocab_size=32, hidden_size=16, num_hidden_layers=1)).eval()


def entered(manager):
    with manager:
        pass


WRONG = {
    # requests
    "Request(model=None)": (lambda h: h.request(model=None), "model is None"),
    "Request(files=(Document,))": (lambda h: h.request(files=(Document("a", "b", "c"),)), "files holds a Document"),
    "Request(files=5)": (lambda h: h.request(files=5), "files is 5"),
    "Request(files=[None])": (lambda h: h.request(files=[None]), "files is a tuple of NoneType"),
    "Request(tokens='512')": (lambda h: h.request(tokens="512"), "tokens is '512'"),
    "Request(tokens=24.5)": (lambda h: h.request(tokens=24.5), "tokens is 24.5"),
    "Request(tokens=True)": (lambda h: h.request(tokens=True), "tokens is True"),
    "Request(tokens=-3)": (lambda h: h.request(tokens=-3), "tokens is -3"),
    "Request(documents='2')": (lambda h: h.request(documents="2"), "documents is '2'"),
    "Request(documents=0)": (lambda h: h.request(documents=0), "documents is 0"),
    "Request(documents=1.5)": (lambda h: h.request(documents=1.5), "documents is 1.5"),
    "Request(chunk='512')": (lambda h: h.request(chunk="512"), "chunk is '512'"),
    "Request(beyond='no')": (lambda h: h.request(beyond="no"), "beyond is 'no'"),
    "Request(measurement=None)": (lambda h: h.request(measurement=None), "measurement is None"),
    "Request(options=None)": (lambda h: h.request(options=None), "options is None"),
    "Request(options=list)": (lambda h: h.request(options=["skip=1"]), "options is a list of str"),
    "Request(options={1: 2})": (lambda h: h.request(options={1: 2}), "options is a dict"),
    "Request(prompts=3)": (lambda h: h.request(prompts=3, files=None), "prompts is 3"),
    "Request(items=3)": (lambda h: h.request(items=3), "items is 3"),
    "Request(token=3)": (lambda h: h.request(token=3), "did you mean 'tokens'"),
    "Request('axes', 'gpt2')": (lambda _: Request("axes", "gpt2"), "too many positional arguments"),
    "Request(texts=[])": (lambda _: Request("axes", texts=[]), "texts is empty"),
    "Request(texts='')": (lambda _: Request("axes", texts=""), "text 1 has only white space"),
    "Request(texts=[3.5])": (lambda _: Request("axes", texts=[3.5]), "text 1 is of type float"),
    "Request(texts=dict)": (lambda _: Request("axes", texts={"input_ids": [1]}), "give its input_ids"),
    "Request(texts=3)": (lambda _: Request("axes", texts=3), "texts is of type int"),
    "Request(text, texts)": (lambda h: h.request(texts=["a b c"]), "were both given"),
    "Request()": (lambda _: Request(), "'measurement'"),
    "Request.with_weights('gold')": (lambda h: h.request().with_weights("gold"), "weights is 'gold'"),
    "ModelRequest(seed='0')": (lambda _: ModelRequest(seed="0"), "seed is '0'"),
    "ModelRequest(seed=None)": (lambda _: ModelRequest(seed=None), "seed is None"),
    "ModelRequest(seed=-1)": (lambda _: ModelRequest(seed=-1), "seed is -1"),
    "ModelRequest(weights='gold')": (lambda _: ModelRequest(weights="gold"), "one of trained, random, shuffled"),
    "ModelRequest(model=None)": (lambda _: ModelRequest(model=None), "model is None"),
    "ModelRequest(model=module)": (lambda h: ModelRequest(model=h.model), "LlamaForCausalLM is a model in memory"),
    "ModelRequest(modle=…)": (lambda _: ModelRequest(modle="a"), "did you mean 'model'"),
    # run
    "run(None)": (lambda h: h.run(None), "request is None"),
    "run(dict)": (lambda h: h.run({"measurement": "axes"}), "request is a dict"),
    "run('axis')": (lambda h: h.run("axis"), "did you mean 'axes'"),
    "run(unknown option)": (lambda h: h.run(h.request(options={"skp": 1})), "did you mean 'skip'"),
    "run(option of another type)": (lambda h: h.run(h.request(options={"skip": [1]})), "skip=[1]"),
    "run(out=3)": (lambda h: h.run(h.request(), out=3), "out is 3"),
    "run(out=file)": (lambda h: h.run(h.request(tokens=20), out=h.tmp / "text.txt"), "is not a folder"),
    "run(progress='yes')": (lambda h: h.run(h.request(), progress="yes"), "progress is 'yes'"),
    "run(progress=print)": (lambda h: h.run(h.request(), progress=print), "must be a Progress or None"),
    "make_report(3)": (lambda h: make_report(3, out=h.tmp), "models is 3"),
    # show
    "show(None)": (lambda _: wherewhat.show(None, "the cat"), "model is of type NoneType"),
    "show('')": (lambda h: wherewhat.show(h.loaded, ""), "prompt has only white space"),
    "show(3)": (lambda h: wherewhat.show(h.loaded, 3), "texts is of type int"),
    "show(head=3)": (lambda h: wherewhat.show(h.loaded, "the cat", head=3), "head is 3"),
    "show(head='L99H0')": (lambda h: wherewhat.show(h.loaded, "the cat", head="L99H0"), "no head L99H0"),
    "show(layers='all')": (
        lambda h: wherewhat.show(h.loaded, "the cat", layers="all"),
        "layers holds 'a': give whole numbers, such as [0, 5]",
    ),
    "show(layers=[1.5])": (lambda h: wherewhat.show(h.loaded, "the cat", layers=[1.5]), "layers holds 1.5"),
    "show(heads=result of axes)": (lambda h: wherewhat.show(h.loaded, "the cat", heads=h.result), "a run of axes"),
    "show(heads=folder)": (lambda h: wherewhat.show(h.loaded, "the cat", heads=h.tmp), "is not a run directory"),
    "show(mamba)": (lambda _: wherewhat.show(mamba(), IDS[0]), "MambaForCausalLM"),
    "show().save(folder)": (lambda h: wherewhat.show(h.loaded, "the cat").save(h.tmp), "is a folder"),
    # load
    "load(module)": (lambda h: wherewhat.load(h.model), "LlamaForCausalLM is a model in memory"),
    "load(LoadedModel)": (lambda h: wherewhat.load(h.loaded), "LoadedModel is a model in memory"),
    "load(None)": (lambda _: wherewhat.load(None), "spec is None"),
    "load(3)": (lambda _: wherewhat.load(3), "spec is 3"),
    "load(b'smollm2')": (lambda _: wherewhat.load(b"smollm2"), "spec is b'smollm2'"),
    "load(tokenizer=3)": (lambda h: wherewhat.load(h.folder, tokenizer=3), "tokenizer is int"),
    "load('')": (lambda _: wherewhat.load(""), "the model name is empty"),
    "load(text file)": (lambda h: wherewhat.load(h.tmp / "text.txt"), "not a GGUF one"),
    "load(device=None)": (lambda h: wherewhat.load(h.folder, device=None), "device is None"),
    "load(dtype=32)": (lambda h: wherewhat.load(h.folder, dtype=32), "dtype is 32"),
    "load(dtype=int8)": (lambda h: wherewhat.load(h.folder, dtype=torch.int8), "unknown dtype 'int8'"),
    "load(seed='1')": (lambda h: wherewhat.load(h.folder, seed="1"), "seed is '1'"),
    "load(weights=None)": (lambda h: wherewhat.load(h.folder, weights=None), "weights is None"),
    "load(attn_implementation=3)": (lambda h: wherewhat.load(h.folder, attn_implementation=3), "it must be a string"),
    "load(cache_dir=3)": (lambda h: wherewhat.load(h.folder, cache_dir=3), "cache_dir is 3"),
    "load(progress='yes')": (lambda h: wherewhat.load(h.folder, progress="yes"), "must be a function or None"),
    "load(precision=…)": (lambda h: wherewhat.load(h.folder, precision="x"), "load has no argument 'precision'"),
    "load(a, b)": (lambda h: wherewhat.load(h.folder, "trained"), "too many positional arguments"),
    # prove and capture
    "prove(T5)": (lambda _: wherewhat.prove(t5()), "encoder-decoder"),
    "capture(T5)": (lambda _: entered(wherewhat.capture(t5(), print)), "encoder-decoder"),
    "prove(meta)": (lambda h: wherewhat.prove(on_meta(h.model)), "on the meta device"),
    "capture(meta)": (lambda h: entered(wherewhat.capture(on_meta(h.model), print)), "on the meta device"),
    "prove(no head)": (lambda h: wherewhat.prove(LlamaModel(h.model.config).eval()), "returns no logits"),
    "prove(Mamba)": (lambda _: wherewhat.prove(mamba()), "no softmax attention"),
    "prove(ViT)": (lambda _: wherewhat.prove(vit()), "cannot be run on token ids alone"),
    "prove(tokenizer)": (lambda h: wherewhat.prove(h.loaded.tokenizer), "not a model of transformers"),
    "prove(LoadedModel)": (lambda h: wherewhat.prove(h.loaded), "give its .model"),
    "capture(LoadedModel)": (lambda h: entered(wherewhat.capture(h.loaded, print)), "give its .model"),
    "capture(None)": (lambda _: entered(wherewhat.capture(None, print)), "NoneType is not a model"),
    "capture('smollm2')": (lambda _: entered(wherewhat.capture("smollm2", print)), "load it first"),
    "capture(Linear)": (lambda _: entered(wherewhat.capture(torch.nn.Linear(2, 2), print)), "Linear is not a model"),
    "capture(class)": (lambda _: entered(wherewhat.capture(LlamaForCausalLM, print)), "is not a model"),
    "capture(reducer=None)": (lambda h: entered(wherewhat.capture(h.model, None)), "reducer is None"),
    "capture(reducer=[])": (lambda h: entered(wherewhat.capture(h.model, [])), "reducer is a list"),
    "capture(proof='x')": (lambda h: entered(wherewhat.capture(h.model, print, proof="x")), "proof is 'x'"),
    "intervene(editor=None)": (lambda h: entered(wherewhat.intervene(h.model, None)), "editor is None"),
    "intervene(blind='no')": (lambda h: entered(wherewhat.intervene(h.model, print, blind="no")), "blind is 'no'"),
    "prove(ids: list)": (lambda h: wherewhat.prove(h.model, input_ids=IDS.tolist()), "input_ids is a list"),
    "prove(ids: text)": (lambda h: wherewhat.prove(h.model, input_ids="the cat"), "input_ids is 'the cat'"),
    "prove(ids: (n,))": (lambda h: wherewhat.prove(h.model, input_ids=IDS[0]), "shape (16,)"),
    "prove(ids: (1, 1, n))": (lambda h: wherewhat.prove(h.model, input_ids=IDS[None]), "shape (1, 1, 16)"),
    "prove(ids: empty)": (lambda h: wherewhat.prove(h.model, input_ids=IDS[:, :0]), "shape (1, 0)"),
    "prove(ids: float)": (lambda h: wherewhat.prove(h.model, input_ids=IDS.float()), "dtype float32"),
    "prove(ids: too large)": (lambda h: wherewhat.prove(h.model, input_ids=IDS + 100), "0 to 15"),
    "prove(ids: negative)": (lambda h: wherewhat.prove(h.model, input_ids=IDS - 3), "holds -3"),
    "prove(ids: meta)": (lambda h: wherewhat.prove(h.model, input_ids=IDS.to("meta")), "on meta"),
    "prove(length=-1)": (lambda h: wherewhat.prove(h.model, length=-1), "length is -1"),
    "prove(length='23')": (lambda h: wherewhat.prove(h.model, length="23"), "length is '23'"),
    "prove(length=23.0)": (lambda h: wherewhat.prove(h.model, length=23.0), "length is 23.0"),
    # results
    "plot('mapp')": (lambda h: h.result.plot("mapp"), "did you mean 'map'"),
    "plot(3)": (lambda h: h.result.plot(3), "name is 3"),
    "plot(metric='rr')": (lambda h: h.result.plot("map", metric="rr"), "no metric 'rr'"),
    "plot(metric=3)": (lambda h: h.result.plot("map", metric=3), "metric is 3"),
    "plot(layer='0')": (lambda h: h.result.plot("distance", layer="0"), "layer is '0'"),
    "plot(head='0')": (lambda h: h.result.plot("distance", head="0"), "head is '0'"),
    "plot(head=99)": (lambda h: h.result.plot("distance", head=99), "no head 99"),
    "plot(colour='red')": (lambda h: h.result.plot("map", colour="red"), "no option colour"),
    "export(None)": (lambda h: h.result.export(None), "path is None"),
    "export('scores')": (lambda h: h.result.export("scores"), "has no known extension"),
    "export('r.csv', metric=…)": (lambda h: h.result.export("r.csv", metric="r"), "holds all scores"),
    "Result.load(None)": (lambda _: Result.load(None), "path is None"),
    "Result.load('missing')": (lambda _: Result.load("missing"), "not a run directory"),
    "Result.load(file)": (lambda h: Result.load(h.tmp / "text.txt"), "not a run directory"),
    "RunDirectory.load(3)": (lambda _: RunDirectory.load(3), "path is 3"),
    "RunDirectory.open(name=3)": (lambda h: RunDirectory.open(h.tmp, name=3, config={}), "name is 3"),
    "RunDirectory.open(config=list)": (lambda h: RunDirectory.open(h.tmp, name="a", config=[1]), "config is a list"),
    "RunDirectory.open(config=object)": (
        lambda h: RunDirectory.open(h.tmp, name="a", config={"a": object()}),
        "config.a has type object",
    ),
    "RunDirectory.part(3)": (lambda h: h.result.directory.part(3), "key is 3"),
    "RunDirectory.has(None)": (lambda h: h.result.directory.has(None), "key is None"),
    # texts
    "read_documents(3)": (lambda _: wherewhat.read_documents(3), "sources is 3"),
    "read_documents([None])": (lambda _: wherewhat.read_documents([None]), "sources is a list of NoneType"),
    "read_documents(documents)": (
        lambda _: wherewhat.read_documents(wherewhat.embedded_documents(1)),
        "sources is a list of Document",
    ),
    "read_documents(bytes)": (lambda _: wherewhat.read_documents(b"t.txt"), "sources is b't.txt'"),
    "read_documents(dict)": (lambda _: wherewhat.read_documents({"a": "b"}), "sources is a dict"),
    "read_documents(count='1')": (lambda _: wherewhat.read_documents(None, count="1"), "count is '1'"),
    "read_documents(count=1.5)": (lambda _: wherewhat.read_documents(None, count=1.5), "count is 1.5"),
    "read_documents(separator=3)": (lambda _: wherewhat.read_documents("a", separator=3), "separator is 3"),
    "read_documents(stdin=text)": (lambda _: wherewhat.read_documents("-", stdin="a"), "stdin is 'a'"),
    "read_documents(stdin=StringIO)": (
        lambda _: wherewhat.read_documents("-", stdin=io.StringIO("a")),
        "must be a binary stream or None",
    ),
    "embedded_documents('2')": (lambda _: wherewhat.embedded_documents("2"), "count is '2'"),
    "embedded_documents(0)": (lambda _: wherewhat.embedded_documents(0), "0 documents"),
    "Document(1, 2, 3)": (lambda _: Document(1, 2, 3), "name is 1"),
    "Document('a')": (lambda _: Document("a"), "'text'"),
    "encode(None)": (lambda h: h.loaded.encode(None), "text is None"),
    "encode(list)": (lambda h: h.loaded.encode(["a", "b"]), "text is a list of str"),
    "encode(Document)": (lambda h: h.loaded.encode(Document("a", "b", "c")), "text is a Document"),
    "encode(bytes)": (lambda h: h.loaded.encode(b"the"), "text is b'the'"),
    "encode(lone surrogate)": (lambda h: h.loaded.encode("\ud800"), "the tokenizer cannot read the text"),
    "encode('')": (lambda h: h.loaded.encode(""), "the text is empty"),
    "encode(tokens='2')": (lambda h: h.loaded.encode("the cat", tokens="2"), "tokens is '2'"),
    "encode(tokens=1.5)": (lambda h: h.loaded.encode("the cat", tokens=1.5), "tokens is 1.5"),
    "encode(tokens=-1)": (lambda h: h.loaded.encode("the cat", tokens=-1), "tokens=-1"),
}

RIGHT = {
    "Request(model=name)": lambda h: h.request().model == ModelRequest(model=str(h.folder)),
    "Request(model=module)": lambda h: h.request(model=h.model).model.module is h.model,
    "Request(model=loaded)": lambda h: h.request(model=h.loaded).model.loaded is h.loaded,
    "Request(texts)": lambda _: [d.name for d in Request("axes", texts=["a", "b"]).texts] == ["text-1", "text-2"],
    "Request(texts=ids)": lambda _: Request("axes", texts=torch.ones(1, 3).long()).texts[0].ids == (1, 1, 1),
    "run(out=None)": lambda h: h.run(h.request(), out=None).in_memory,
    "Request(model=path)": lambda h: h.request(model=h.folder).model == ModelRequest(model=h.folder),
    "Request(files=list of paths)": lambda h: h.request(files=[Path("a"), "b"]).files == ("a", "b"),
    "run(tokens=numpy)": lambda h: h.run(h.request(tokens=np.int64(24))).path == h.result.path,
    "ModelRequest(dtype=torch)": lambda _: ModelRequest(dtype=torch.float32) == ModelRequest(),
    "ModelRequest(device=torch)": lambda _: ModelRequest(device=torch.device("cpu")).device == "cpu",
    "run(out=text)": lambda h: h.run(h.request(), out=str(h.tmp / "runs")).path == h.result.path,
    "Result.load(text)": lambda h: Result.load(str(h.result.path)).config == h.result.config,
    "export(text)": lambda h: h.result.export(str(h.tmp / "scores.csv")).is_file(),
    "read_documents(text)": lambda h: len(wherewhat.read_documents(str(h.tmp / "text.txt"))) == 1,
    "read_documents(stdin)": lambda _: wherewhat.read_documents("-", stdin=io.BytesIO(b"a"))[0].text == "a",
}


def test_wrong_calls_are_one_line(here, subtests):
    for name, (call, words) in WRONG.items():
        with subtests.test(call=name):
            with pytest.raises(WherewhatError) as raised:
                call(here)
            assert words in str(raised.value)
            assert "\n" not in str(raised.value)


def test_natural_calls_work(here, subtests):
    for name, call in RIGHT.items():
        with subtests.test(call=name):
            assert call(here)


def test_a_measurements_name_is_a_request(monkeypatch, tmp_path):
    asked = []

    def run(request, *_, **__):
        asked.append(request)
        raise WherewhatError("enough")

    monkeypatch.setattr("wherewhat.report.result.run_with_controls", run)
    with pytest.raises(WherewhatError, match="enough"):
        wherewhat.run("axes", out=tmp_path)
    assert asked == [[Request(measurement="axes")]]
