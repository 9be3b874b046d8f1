"""Run the peers' decoders behind one pipe: a JSON request a line, a JSON reply a line.

    python worker.py MODELS --threads 1 --arms hf-bfloat16 hf-bfloat16-lookup

MODELS is what prepare.py wrote. Requests (all decoding is greedy, batch 1):

    {"arm": "hf-float32", "ids": [..], "max_new_tokens": 128, "ignore_eos": true}
        -> {"arm", "ids": [new ids], "wall": s, "cpu": s, "forwards": n or null}
    {"arm": "hf-float32", "op": "step_times", "context": 256, "rows": [1, 2, 4],
     "repeats": 20}
        -> {"arm", "context", "repeats", "rows": {"1": {"min": s, "median": s}, ..}}
    {"op": "info"}
        -> versions, threads, arms, and the cores this process may use
    {"arm": .., "op": "load"}
        -> {"arm", "seconds": s}; otherwise an arm's engine loads at its first request

A request that fails is answered by {"arm", "error": cause}, and the worker goes on.
It ends when its standard input does. Whatever the engines print goes to standard error.

`cpu` is the process's CPU time, all threads together. `wall` and `cpu` hold prefill and
decoding, never loading. `forwards` counts passes of the target, the prefill being one;
only transformers lets them be counted. With `ignore_eos` an end-of-sequence token is a
token like any other (it is kept, and decoding goes on); without it, it is the last one.
"""

import argparse
import functools
import importlib.metadata
import json
import logging
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol, TextIO

LOG = logging.getLogger(__name__)
LOOKUP_TOKENS = 10
ENGINES = ("transformers", "torch", "ctranslate2", "onnxruntime-genai")


class Engine(Protocol):
    """One loaded model of one library."""

    def generate(
        self, ids: list[int], count: int, ignore_eos: bool
    ) -> tuple[list[int], int | None]:
        """Return the new ids and, where they can be counted, the forward passes."""


class HuggingFace:
    """A transformers model in one dtype; plain and lookup decoding share it."""

    def __init__(self, models: Path, threads: int, dtype: str):
        import torch
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(threads)
        torch.set_grad_enabled(False)
        self.torch = torch
        self.model = AutoModelForCausalLM.from_pretrained(
            models / "hf", dtype=getattr(torch, dtype)
        ).eval()
        self.eos = self.model.generation_config.eos_token_id
        # generate() fills what a request leaves unset from here, so that "no EOS"
        # could not be asked for.
        self.model.generation_config.eos_token_id = None
        self.forwards = 0
        self.model.register_forward_pre_hook(self._count)

    def _count(self, *_: Any) -> None:
        self.forwards += 1

    def generate(
        self,
        ids: list[int],
        count: int,
        ignore_eos: bool,
        lookup: int | None = None,
    ) -> tuple[list[int], int | None]:
        """Decode, by prompt lookup where `lookup` says how many tokens to draft."""
        from transformers import GenerationConfig

        eos = None if ignore_eos else self.eos
        settings = GenerationConfig(
            do_sample=False,
            max_new_tokens=count,
            eos_token_id=eos,
            prompt_lookup_num_tokens=lookup,
        )
        prompt = self.torch.tensor([ids])
        mask = self.torch.ones_like(prompt)
        self.forwards = 0
        output = self.model.generate(
            prompt, attention_mask=mask, generation_config=settings
        )
        return output[0, len(ids) :].tolist(), self.forwards

    def step_times(
        self, context: int, rows: list[int], repeats: int
    ) -> dict[int, list[float]]:
        """Time a pass of each row count over a cache of `context` tokens.

        The row counts take turns, so that a slow spell of the machine meets them all.
        """
        from transformers import DynamicCache

        generator = self.torch.Generator().manual_seed(0)
        draw = functools.partial(
            self.torch.randint, 100, 10_000, generator=generator, dtype=self.torch.int64
        )
        cache = DynamicCache(config=self.model.config)
        self.model(draw((1, context)), cache=cache, use_cache=True)
        windows = {count: draw((1, count)) for count in rows}
        times: dict[int, list[float]] = {count: [] for count in rows}
        for turn in range(repeats + 1):
            for count, window in windows.items():
                start = time.perf_counter()
                self.model(window, cache=cache, use_cache=True)
                passed = time.perf_counter() - start
                cache.crop(-count)
                if turn:  # the first turn warms up
                    times[count].append(passed)
        if cache.get_seq_length() != context:
            raise RuntimeError("the cache was not cropped back to its context")
        return times


class CTranslate2:
    """CTranslate2 in float32. It speaks tokens, so ids pass through the vocabulary."""

    def __init__(self, models: Path, threads: int):
        import ctranslate2
        from transformers import AutoTokenizer

        self.tokenizer = AutoTokenizer.from_pretrained(models / "hf")
        self.generator = ctranslate2.Generator(
            str(models / "ct2-float32"),
            device="cpu",
            compute_type="float32",
            inter_threads=1,
            intra_threads=threads,
        )

    def generate(
        self, ids: list[int], count: int, ignore_eos: bool
    ) -> tuple[list[int], int | None]:
        """Decode; CTranslate2 does not tell how many passes it made."""
        end = [] if ignore_eos else [self.tokenizer.eos_token]
        (result,) = self.generator.generate_batch(
            [self.tokenizer.convert_ids_to_tokens(ids)],
            beam_size=1,
            sampling_topk=1,
            max_length=count,
            end_token=end,
            return_end_token=True,
            include_prompt_in_result=False,
        )
        return result.sequences_ids[0], None


class OnnxRuntime:
    """ONNX Runtime GenAI in float32."""

    def __init__(self, models: Path, threads: int):
        import onnxruntime_genai

        self.library = onnxruntime_genai
        path = models / "ort-float32"
        settings = json.loads((path / "genai_config.json").read_text())["model"]
        eos = settings["eos_token_id"]
        self.eos = set(eos if isinstance(eos, list) else [eos])
        config = onnxruntime_genai.Config(str(path))
        session = {"intra_op_num_threads": threads, "inter_op_num_threads": 1}
        # After its EOS the library only pads, and with none it takes the padding's id
        # for one. So it gets a special token that text never holds, and generate()
        # looks for the true EOS.
        tokenizer = json.loads((models / "hf" / "tokenizer.json").read_text())
        self.stand_in = tokenizer["added_tokens"][-1]["id"]
        decoder = {"session_options": session}
        overlay = {"model": {"eos_token_id": self.stand_in, "decoder": decoder}}
        config.overlay(json.dumps(overlay))
        self.model = onnxruntime_genai.Model(config)

    def generate(
        self, ids: list[int], count: int, ignore_eos: bool
    ) -> tuple[list[int], int | None]:
        """Decode token by token."""
        parameters = self.library.GeneratorParams(self.model)
        parameters.set_search_options(
            max_length=len(ids) + count, do_sample=False, batch_size=1
        )
        generator = self.library.Generator(self.model, parameters)
        generator.append_tokens(ids)
        new: list[int] = []
        while len(new) < count:
            generator.generate_next_token()
            new.append(int(generator.get_next_tokens()[0]))
            if new[-1] in self.eos and not ignore_eos:
                break
            if new[-1] == self.stand_in:
                raise RuntimeError("the token that stands in for EOS was generated")
        return new, None


class Peers:
    """The arms asked for, each engine loaded once, when it is first needed."""

    def __init__(self, models: Path, threads: int, arms: list[str]):
        self.models = models
        self.threads = threads
        self.arms = arms
        config = json.loads((models / "hf" / "config.json").read_text())
        self.vocabulary = config["vocab_size"]
        self.engine = functools.cache(self._load)

    def _load(self, name: str) -> Any:
        if name == "ct2-float32":
            return CTranslate2(self.models, self.threads)
        if name == "ort-float32":
            return OnnxRuntime(self.models, self.threads)
        return HuggingFace(self.models, self.threads, name.removeprefix("hf-"))

    def arm(self, name: str) -> tuple[Any, Callable[..., Any]]:
        """Return the arm's engine and its way to decode."""
        if name not in self.arms:
            raise ValueError(f"arm {name!r} is not among this worker's {self.arms}")
        engine = self.engine(name.removesuffix("-lookup"))
        if name.endswith("-lookup"):
            lookup = functools.partial(engine.generate, lookup=LOOKUP_TOKENS)
            return engine, lookup
        return engine, engine.generate

    def info(self) -> dict[str, Any]:
        """Say what would be measured."""
        versions = {name: importlib.metadata.version(name) for name in ENGINES}
        return {
            "versions": versions,
            "threads": self.threads,
            "cores": sorted(os.sched_getaffinity(0)),
            "arms": self.arms,
        }

    def load(self, arm: str) -> dict[str, Any]:
        """Load the arm's engine now."""
        start = time.perf_counter()
        self.arm(arm)
        return {"seconds": time.perf_counter() - start}

    def step_times(
        self, arm: str, context: int, rows: list[int], repeats: int
    ) -> dict[str, Any]:
        """Time passes of several row counts over a filled cache."""
        engine, _ = self.arm(arm)
        if not isinstance(engine, HuggingFace):
            raise TypeError(f"{arm} does not show its passes: step_times is for hf-*")
        times = engine.step_times(context, rows, repeats)
        summary = {
            str(count): {"min": min(seen), "median": statistics.median(seen)}
            for count, seen in times.items()
        }
        return {"context": context, "repeats": repeats, "rows": summary}

    def generate(
        self,
        arm: str,
        ids: list[int],
        max_new_tokens: int = 128,
        ignore_eos: bool = False,
    ) -> dict[str, Any]:
        """Decode one prompt and time it."""
        _, decode = self.arm(arm)
        # Some engines accept such ids and answer with anything.
        if not ids or not all(0 <= index < self.vocabulary for index in ids):
            raise ValueError(f"ids must be one or more of 0..{self.vocabulary - 1}")
        wall, cpu = time.perf_counter(), time.process_time()
        new, forwards = decode(ids, max_new_tokens, ignore_eos)
        cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
        return {"ids": new, "wall": wall, "cpu": cpu, "forwards": forwards}

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Carry out one request."""
        operations = {
            "generate": self.generate,
            "step_times": self.step_times,
            "load": self.load,
            "info": self.info,
        }
        name = request.pop("op", "generate")
        if name not in operations:
            raise ValueError(f"op {name!r} is not one of {sorted(operations)}")
        return operations[name](**request)


def reply(peers: Peers, line: str) -> dict[str, Any]:
    """Answer one line; whatever goes wrong becomes part of the answer."""
    arm = None
    try:
        request = json.loads(line)
        if not isinstance(request, dict):
            raise TypeError("a request is a JSON object")
        arm = request.get("arm")
        result = peers.answer(request)
    except Exception as error:  # the process's boundary: the caller must hear of it
        LOG.exception("the request failed")
        result = {"error": f"{type(error).__name__}: {error}"}
    return result if arm is None else {"arm": arm} | result


def take_stdout() -> TextIO:
    """Keep standard output for replies; what libraries print goes to standard error."""
    sys.stdout.flush()
    channel = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    return channel


def main() -> None:
    """Answer requests until standard input ends."""
    names = [f"hf-{dtype}" for dtype in ("float32", "bfloat16")]
    names += [f"{name}-lookup" for name in names] + ["ct2-float32", "ort-float32"]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", type=Path, help="the folder that prepare.py wrote")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--arms", nargs="+", choices=names, default=names)
    arguments = parser.parse_args()
    replies = take_stdout()
    peers = Peers(arguments.models, arguments.threads, arguments.arms)
    for line in sys.stdin:
        if line.strip():
            print(json.dumps(reply(peers, line)), file=replies, flush=True)


if __name__ == "__main__":
    main()
