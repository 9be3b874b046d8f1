"""Every mistake of a user: exit status 2, one line that names option and fix."""

from pathlib import Path

import pytest

from specjax.checkpoints import Checkpoint
from specjax.cli import options
from specjax.cli.generate import Generate


def is_refused(result, *expected):
    assert result.status == 2
    assert result.out == ""
    lines = result.err.splitlines()
    assert len(lines) == 1, result.err
    assert lines[0].startswith("specjax: error: ")
    assert "\x1b[" not in lines[0]
    for text in expected:
        assert text in lines[0]


BEFORE_LOADING = {
    "no prompt": ([], ["--prompt TEXT or --prompt-file FILE"]),
    "two prompts": (["--prompt", "a", "--prompt-file", "b"], ["one of them"]),
    "ids and text": (["--prompt-ids", "1", "--prompt", "a"], ["leave out --prompt"]),
    "ids and chat": (["--prompt-ids", "1", "--chat"], ["leave out --chat"]),
    "empty prompt": (["--prompt", ""], ["--prompt is empty", "at least one"]),
    "no such file": (["--prompt-file", "nowhere.txt"], ["nowhere.txt"]),
    "no such model": (
        ["--prompt", "a", "--model", "smollm2-135"],
        ["--model smollm2-135:", "did you mean 'smollm2-135m'"],
    ),
    "empty model": (["--prompt", "a", "--model", ""], ["--model is empty"]),
    "dtype": (["--prompt", "a", "--dtype", "float16"], ["--dtype float16", "bfloat16"]),
    "drafter": (
        ["--prompt", "a", "--drafter", "ngrm"],
        ["--drafter ngrm", "none, ngram, suffix", "did you mean 'ngram'"],
    ),
    "rule": (["--prompt", "a", "--rule", "gready"], ["--rule gready", "greedy"]),
    "greedy rule, sampled": (
        ["--prompt", "a", "--rule", "greedy", "--temperature", "0.5"],
        ["--rule greedy", "--temperature 0.5", "leave out"],
    ),
    "negative temperature": (
        ["--prompt", "a", "--temperature", "-0.5"],
        ["--temperature -0.5: it must be 0 or more"],
    ),
    "infinite temperature": (["--prompt", "a", "--temperature", "inf"], ["0 or more"]),
    "k": (["--prompt", "a", "--k", "0"], ["--k 0", "at least 1", "--drafter none"]),
    "min-n": (["--prompt", "a", "--min-n", "0"], ["--min-n 0"]),
    "max-n": (["--prompt", "a", "--max-n", "1"], ["--max-n 1", "--min-n"]),
    "no draft model": (
        ["--prompt", "a", "--drafter", "draft-model"],
        ["--draft-model NAME|PATH"],
    ),
    "useless draft model": (
        ["--prompt", "a", "--draft-model", "x"],
        ["--draft-model does nothing with --drafter ngram"],
    ),
    "useless rollback": (
        ["--prompt", "a", "--rollback", "ring"],
        ["--rollback ring does nothing with this model", "leave it out"],
    ),
    "cache dtype": (
        ["--prompt", "a", "--cache-dtype", "int4"],
        ["--cache-dtype int4: it must be one of auto, int8, fp8"],
    ),
    "max-tokens": (["--prompt", "a", "--max-tokens", "-1"], ["--max-tokens -1"]),
    "seed": (["--prompt", "a", "--seed", "-1"], ["--seed -1"]),
    "top-p": (["--prompt", "a", "--top-p", "1.5"], ["--top-p 1.5", "at most 1"]),
    "top-k": (["--prompt", "a", "--top-k", "-2"], ["--top-k -2"]),
    "min-p": (["--prompt", "a", "--min-p", "2"], ["--min-p 2.0"]),
    "penalty": (["--prompt", "a", "--repetition-penalty", "0"], ["--repetition-pen"]),
    "stop": (["--prompt", "a", "--stop", ""], ["--stop holds an empty string"]),
    "logprobs": (["--prompt", "a", "--logprobs", "-1"], ["--logprobs -1"]),
    "capacity": (["--prompt", "a", "--capacity", "0"], ["--capacity 0"]),
    "page-size": (["--prompt", "a", "--page-size", "8"], ["--page-size 8 needs --pag"]),
    "rounds": (["--prompt", "a", "--rounds-per-call", "0"], ["--rounds-per-call 0"]),
}


@pytest.mark.parametrize("case", BEFORE_LOADING)
def test_generate_refuses(run, case):
    arguments, expected = BEFORE_LOADING[case]
    is_refused(run("generate", *arguments), *expected)


AFTER_LOADING = {
    "eos": (["--eos", "3", "999"], ["--eos 999", "below 256"]),
    "long prompt": (["--capacity", "2"], ["--capacity 2", "4 tokens", "raise"]),
    "large k": (["--capacity", "8", "--k", "8"], ["--k 8", "capacity of 8", "lower"]),
    "k beyond the context": (["--k", "8192"], ["--k 8192", "lower --k"]),
    "logprobs": (["--logprobs", "257"], ["--logprobs 257", "256"]),
    "pages": (["--pages", "1", "--page-size", "3"], ["--pages 1: ", "2 pages of 3"]),
}


@pytest.mark.parametrize("case", AFTER_LOADING)
def test_generate_refuses_what_the_model_cannot_do(run, model, case):
    arguments, expected = AFTER_LOADING[case]
    result = run("generate", "--model", model, "--prompt", "abcd", *arguments)
    is_refused(result, *expected)


def test_a_cache_of_latents_is_refused_by_name(run):
    model = Path(__file__).resolve().parents[1] / "data/oracles/deepseek_v3"
    asked = ("--model", model, "--prompt-ids", 5, 17, "--cache-dtype", "fp8")
    told = "--cache-dtype fp8: block 0 is latent attention"
    is_refused(run("generate", *asked), told, "leave it out")


def test_a_prompt_longer_than_the_context(run, model):
    result = run("generate", "--model", model, "--prompt", "a" * 8193)
    is_refused(result, "8193 tokens", "context is 8192", "shorten")


def test_a_prompt_file_that_is_not_utf8(run, tmp_path):
    file = tmp_path / "latin"
    file.write_bytes("é".encode("latin-1"))
    is_refused(run("generate", "--prompt-file", file), "not UTF-8", str(file))


def test_a_model_without_tokenizer_or_template(run, model, tmp_path):
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).symlink_to(model / name)
    is_refused(run("generate", "--model", tmp_path, "--prompt", "a"), "tokenizer.json")
    (tmp_path / "tokenizer.json").symlink_to(model / "tokenizer.json")
    result = run("generate", "--model", tmp_path, "--prompt", "a", "--chat")
    is_refused(result, "chat template")


def test_truncated_weights_are_named(run, model, tmp_path):
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).symlink_to(model / name)
    weights = (model / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    result = run("generate", "--model", tmp_path, "--prompt", "a")
    is_refused(result, "--model", "model.safetensors")


def test_a_draft_model_of_another_vocabulary(run, model, monkeypatch):
    def bigger(option: str, name: str, dtype: str) -> Checkpoint:
        import dataclasses

        loaded = load(option, name, dtype)
        if option == "--model":
            return loaded
        config = dataclasses.replace(loaded.config, vocab_size=300)
        decoder = loaded.decoder.replace(config=config)
        return dataclasses.replace(loaded, decoder=decoder, tokenizer=None)

    load = options.load_model
    monkeypatch.setattr(options, "load_model", bigger)
    result = run(
        *("generate", "--model", model, "--prompt", "a", "--drafter", "draft-model"),
        *("--draft-model", model),
    )
    is_refused(result, "--draft-model", "vocabulary of 300", "256", "same family")


BENCH = {
    "drafters": (["--drafters", "ngram", "magic"], ["--drafters magic", "ngram"]),
    "k": (["--k", "3", "0"], ["--k 0", "at least 1"]),
    "kinds": (["--kinds", "code", "poem"], ["--kinds poem", "wiki"]),
    "per-kind": (["--per-kind", "99"], ["--per-kind", "99"]),
    "max-tokens": (["--max-tokens", "0"], ["--max-tokens 0"]),
    "repeats": (["--repeats", "0"], ["--repeats 0"]),
    "temperature": (["--temperature", "-1"], ["--temperature -1.0"]),
    "dtype": (["--dtype", "f32"], ["--dtype f32", "float32"]),
    "draft model": (["--drafters", "draft-model"], ["--draft-model NAME|PATH"]),
    "prompts": (["--prompts", "nowhere.jsonl"], ["nowhere.jsonl"]),
}


@pytest.mark.parametrize("case", BENCH)
def test_bench_refuses(run, model, case):
    arguments, expected = BENCH[case]
    is_refused(run("bench", "--model", model, *arguments), *expected)


def test_bench_names_the_broken_line_and_loses_nothing(run, model, tmp_path):
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "out.jsonl"
    prompts.write_text('{"prompt": "a"}\n{"prompt": "b"\n')
    out.write_text("kept\n")
    result = run("bench", "--model", model, "--prompts", prompts, "--json", out)
    is_refused(result, "--prompts", "prompts.jsonl, line 2", "broken JSON")
    assert out.read_text() == "kept\n"


def test_bench_finds_out_early_that_it_cannot_write(run, tmp_path):
    out = tmp_path / "no" / "out.jsonl"
    is_refused(run("bench", "--model", "not there", "--json", out), str(out))


def test_demo_inspect_and_zoo_refuse(run, tmp_path):
    is_refused(run("demo", "--k", 0), "--k 0")
    is_refused(run("demo", "--max-tokens", 0), "--max-tokens 0")
    is_refused(run("inspect", tmp_path / "nothing"), "nothing")
    is_refused(run("inspect", ""), "empty")
    is_refused(run("zoo", "fetch", "gpt-5"), "gpt-5", "smollm2-135m")


def test_an_argument_that_cannot_be_parsed(run):
    assert run("generate", "--k", "many").status == 2
    assert run("generate", "--no-such-option").status == 2
    assert run("sing").status == 2
    assert run().status == 2


def test_debug_shows_the_traceback(run):
    result = run("generate", "--prompt", "", "--debug")
    assert result.status == 2
    assert "Traceback" in result.err
    assert result.err.splitlines()[-1].startswith("specjax: error: ")


def test_an_error_is_red_on_a_terminal(run, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert run("generate", "--prompt", "").err.startswith("\x1b[31m")


def test_a_bug_of_ours_is_not_dressed_up_as_bad_input(run, monkeypatch):
    def broken(*_):
        raise ValueError("a bug")

    monkeypatch.setattr(Generate, "run", broken)
    with pytest.raises(ValueError, match="a bug"):
        run("generate", "--prompt", "a")


def test_an_interrupt_has_its_own_status(run, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(Generate, "run", interrupted)
    assert run("generate", "--prompt", "a").status == 130
