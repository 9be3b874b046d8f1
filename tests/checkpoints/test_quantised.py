"""Quantised safetensors: values against loops over numbers, and every refusal."""

import json
import re
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from specjax.checkpoints import CheckpointError, describe, load
from specjax.checkpoints.quantised import QuantisedReader, open_reader, scheme_of
from specjax.checkpoints.safetensors import SafetensorsReader

FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
DOWN = "model.layers.0.mlp.down_proj.weight"


def e4m3(code: int) -> float:
    """One sign, four exponent and three mantissa bits; all ones is not a number."""
    sign, exponent, mantissa = code >> 7, (code >> 3) & 15, code & 7
    if exponent == 15 and mantissa == 7:
        return float("nan")
    size = (
        mantissa / 8 * 2**-6
        if exponent == 0
        else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    )
    return -size if sign else size


def e2m1(code: int) -> float:
    """One sign, two exponent bits and one mantissa bit."""
    sign, exponent, mantissa = code >> 3, (code >> 1) & 3, code & 1
    size = mantissa / 2 if exponent == 0 else (1 + mantissa / 2) * 2.0 ** (exponent - 1)
    return -size if sign else size


def fp8_weight(codes: np.ndarray, scales: np.ndarray, block) -> np.ndarray:
    """Number by number; float64 holds the products exactly."""
    values = np.zeros(codes.shape, np.float64)
    for i, j in np.ndindex(*codes.shape):
        scale = float(scales[i // block[0], j // block[1]])
        values[i, j] = e4m3(int(codes[i, j])) * scale
    return values.astype(np.float32)


def mxfp4_weight(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """``[E, rows, blocks, 16]`` and ``[E, rows, blocks]`` -> ``[E, columns, rows]``."""
    experts, rows, count, _ = blocks.shape
    values = np.zeros((experts, 32 * count, rows), np.float64)
    for e, i, block, byte in np.ndindex(*blocks.shape):
        code, scale = int(blocks[e, i, block, byte]), int(scales[e, i, block])
        power = 2.0 ** (scale - 127) if scale < 255 else float("nan")
        column = 32 * block + 2 * byte
        values[e, column, i] = e2m1(code & 15) * power
        values[e, column + 1, i] = e2m1(code >> 4) * power
    return values


def folder(path: Path, tensors: dict, settings: dict | None) -> Path:
    path.mkdir(exist_ok=True)
    save_file(tensors, path / "model.safetensors")
    config = {} if settings is None else {"quantization_config": settings}
    (path / "config.json").write_text(json.dumps(config))
    return path


def reader_of(path: Path) -> SafetensorsReader:
    return open_reader(path, json.loads((path / "config.json").read_text()))


def fp8_parts(shape=(7, 10), block=(3, 4), seed=0) -> dict[str, np.ndarray]:
    draw = np.random.default_rng(seed)
    tiles = [-(-size // side) for size, side in zip(shape, block, strict=True)]
    return {
        "x.weight": draw.integers(0, 256, shape, np.uint8).view(
            ml_dtypes.float8_e4m3fn
        ),
        "x.weight_scale_inv": draw.uniform(0.01, 2, tiles).astype(np.float32),
        "norm.weight": draw.standard_normal(5).astype(ml_dtypes.bfloat16),
    }


def mxfp4_parts(seed=0) -> dict[str, np.ndarray]:
    draw = np.random.default_rng(seed)
    return {
        "experts.up_blocks": draw.integers(0, 256, (3, 5, 2, 16), np.uint8),
        "experts.up_scales": draw.integers(117, 131, (3, 5, 2), np.uint8),
        "experts.up_bias": draw.standard_normal((3, 5)).astype(ml_dtypes.bfloat16),
    }


class TestFP8:
    @pytest.mark.parametrize(
        ("shape", "block"), [((7, 10), (3, 4)), ((6, 8), (3, 4)), ((2, 3), (128, 128))]
    )
    def test_values(self, tmp_path, shape, block):
        parts = fp8_parts(shape, block)
        settings = {**FP8, "weight_block_size": list(block)}
        reader = reader_of(folder(tmp_path, parts, settings))
        codes, scales = parts["x.weight"].view(np.uint8), parts["x.weight_scale_inv"]
        weight = reader.read("x.weight", shape)
        assert weight.dtype == np.float32
        np.testing.assert_array_equal(weight, fp8_weight(codes, scales, block))
        norm = reader.read("norm.weight", (5,))
        np.testing.assert_array_equal(norm, parts["norm.weight"])
        reader.finish()

    def test_every_code(self, tmp_path):
        codes = np.arange(256, dtype=np.uint8).reshape(16, 16)
        parts = {
            "x.weight": codes.view(ml_dtypes.float8_e4m3fn),
            "x.weight_scale_inv": np.ones((1, 1), np.float32),
        }
        weight = reader_of(folder(tmp_path, parts, FP8)).read("x.weight", (16, 16))
        np.testing.assert_array_equal(
            weight, np.array([e4m3(c) for c in range(256)]).reshape(16, 16)
        )
        assert np.isnan(weight).sum() == 2 and np.nanmax(weight) == 448

    def test_blocks_are_128_unless_the_configuration_says_otherwise(self, tmp_path):
        parts = fp8_parts((130, 260), (128, 128))
        weight = reader_of(folder(tmp_path, parts, FP8)).read("x.weight", (130, 260))
        scales = parts["x.weight_scale_inv"]
        assert scales.shape == (2, 3)
        plain = parts["x.weight"].astype(np.float32)
        for at in ((0, 0), (127, 127), (128, 127), (127, 128), (129, 259)):
            scale = scales[at[0] // 128, at[1] // 128]
            np.testing.assert_array_equal(weight[at], plain[at] * scale)

    def test_experts_in_one_tensor_and_bfloat16_scales(self, tmp_path):
        one, two = fp8_parts(seed=1), fp8_parts(seed=2)
        both = {k: np.stack([one[k], two[k]]) for k in one if k.startswith("x.")}
        key = "x.weight_scale_inv"
        both[key] = both[key].astype(ml_dtypes.bfloat16)
        settings = {**FP8, "weight_block_size": [3, 4]}
        weight = reader_of(folder(tmp_path, both, settings)).read(
            "x.weight", (2, 7, 10)
        )
        for e in range(2):
            codes = both["x.weight"][e].view(np.uint8)
            wanted = fp8_weight(codes, both[key][e], (3, 4))
            np.testing.assert_array_equal(weight[e], wanted)

    def test_a_whole_model(self, tiny):
        """It loads as the checkpoint that holds its dequantised weights."""
        plain, stored = {}, {}
        draw = np.random.default_rng(1)
        for name, weight in tiny.weights().items():
            if "_proj" not in name:
                plain[name] = stored[name] = weight
                continue
            rows, columns = (-(-size // 32) for size in weight.shape)
            scales = draw.uniform(0.5, 2, (rows, columns)).astype(np.float32)
            stored[name] = weight.astype(ml_dtypes.float8_e4m3fn)
            stored[f"{name}_scale_inv"] = scales
            spread = scales.repeat(32, 0)[: weight.shape[0]].repeat(32, 1)
            spread = spread[:, : weight.shape[1]]
            plain[name] = stored[name].astype(np.float32) * spread
        settings = {**FP8, "weight_block_size": [32, 32]}
        config = {**tiny.config, "quantization_config": settings}
        path = tiny.directory("fp8", stored, config)
        loaded, wanted = load(path), load(tiny.directory("plain", plain))
        for a, b in zip(
            jax.tree.leaves(loaded.decoder),
            jax.tree.leaves(wanted.decoder),
            strict=True,
        ):
            np.testing.assert_array_equal(a, b)
        assert loaded.source == "fp8, dequantised from FP8"

        found = describe(path)
        assert found.implemented and found.note == ""
        assert found.num_parameters == describe(tiny.folder / "plain").num_parameters
        codes = {n: w for n, w in stored.items() if "_proj" in n}
        assert found.bytes_by_dtype["F8_E4M3"] == sum(w.nbytes for w in codes.values())
        assert set(found.bytes_by_dtype) == {"F8_E4M3", "F32"}


class TestMXFP4:
    def test_values(self, tmp_path):
        parts = mxfp4_parts()
        reader = reader_of(folder(tmp_path, parts, MXFP4))
        weight = reader.read("experts.up", (3, 64, 5))
        wanted = mxfp4_weight(parts["experts.up_blocks"], parts["experts.up_scales"])
        np.testing.assert_array_equal(weight.astype(np.float64), wanted)
        reader.read("experts.up_bias", (3, 5))
        reader.finish()
        (info,) = (i for i in reader.infos.values() if i.dtype == "MXFP4")
        assert (info.size, info.nbytes) == (960, 960 // 2 + 960 // 32)

    def test_every_scale_and_code_is_exact_in_what_is_returned(self, tmp_path):
        """bfloat16 has float32's range: only 2**128 and more are infinite."""
        codes = np.arange(256, dtype=np.uint8)
        blocks = np.broadcast_to(codes.reshape(16, 16), (256, 16, 16))
        scales = np.broadcast_to(codes[:, None], (256, 16))
        parts = {"x_blocks": blocks[None].copy(), "x_scales": scales[None].copy()}
        reader = reader_of(folder(tmp_path, parts, MXFP4))
        weight = reader.read("x", (1, 512, 256)).astype(np.float64)
        wanted = mxfp4_weight(parts["x_blocks"], parts["x_scales"])
        wanted = np.where(
            np.abs(wanted) >= 2.0**128, np.copysign(np.inf, wanted), wanted
        )
        np.testing.assert_array_equal(weight, wanted)
        assert np.isnan(weight[:, :, 255]).all() and np.isfinite(weight[:, :, 0]).all()


def without(parts: dict, *names: str) -> dict:
    return {n: t for n, t in parts.items() if n not in names}


BAD_FP8 = {
    "no scale": (lambda p: without(p, "x.weight_scale_inv"), ["without its scale"]),
    "no weight": (lambda p: without(p, "x.weight"), ["'x.weight', which is not there"]),
    "float weight": (
        lambda p: {**p, "x.weight": np.ones((7, 10), np.float32)},
        ["'x.weight', which is stored as F32"],
    ),
    "other blocks": (
        lambda p: {**p, "x.weight_scale_inv": np.ones((3, 2), np.float32)},
        ["[3, 2]", "[3, 3] blocks of [3, 4]", "weight_block_size"],
    ),
    "a scale a row": (
        lambda p: {**p, "x.weight_scale_inv": np.ones((7,), np.float32)},
        ["shape [7]"],
    ),
    "whole scales": (
        lambda p: {**p, "x.weight_scale_inv": np.ones((3, 3), np.int32)},
        ["stored as I32", "BF16"],
    ),
    "a vector": (
        lambda p: {**p, "x.weight": p["x.weight"][0].copy()},
        ["F8_E4M3 of shape [10]"],
    ),
}

BAD_MXFP4 = {
    "no scales": (
        lambda p: without(p, "experts.up_scales"),
        ["no 'experts.up_scales'"],
    ),
    "no blocks": (
        lambda p: without(p, "experts.up_blocks"),
        ["no 'experts.up_blocks'"],
    ),
    "other shape": (
        lambda p: {**p, "experts.up_scales": np.ones((3, 5, 1), np.uint8)},
        ["[3, 5, 1]", "[3, 5, 2]"],
    ),
    "longer blocks": (
        lambda p: {**p, "experts.up_blocks": np.ones((3, 5, 2, 8), np.uint8)},
        ["[3, 5, 2, 8]", "16"],
    ),
    "float scales": (
        lambda p: {**p, "experts.up_scales": np.ones((3, 5, 2), np.float32)},
        ["'experts.up_scales'", "stored as F32"],
    ),
    "stored twice": (
        lambda p: {**p, "experts.up": np.ones((3, 64, 5), np.float32)},
        ["once more as 'experts.up_blocks'"],
    ),
}


def refused(call, *said: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        call()
    for text in said:
        assert text in str(caught.value)


@pytest.mark.parametrize("case", BAD_FP8)
def test_fp8_parts_that_do_not_fit(tmp_path, case):
    spoil, said = BAD_FP8[case]
    settings = {**FP8, "weight_block_size": [3, 4]}
    path = folder(tmp_path, spoil(fp8_parts()), settings)
    refused(lambda: reader_of(path), "tensor 'x.weight", "model.safetensors", *said)


@pytest.mark.parametrize("case", BAD_MXFP4)
def test_mxfp4_parts_that_do_not_fit(tmp_path, case):
    spoil, said = BAD_MXFP4[case]
    path = folder(tmp_path, spoil(mxfp4_parts()), MXFP4)
    refused(lambda: reader_of(path), "tensor 'experts.up", "model.safetensors", *said)


def test_quantised_weights_without_a_quantization_config(tmp_path):
    fp8 = reader_of(folder(tmp_path / "a", fp8_parts(), None))
    said = ["'x.weight'", "model.safetensors", "F8_E4M3", "no quantization_config"]
    refused(lambda: fp8.read("x.weight", (7, 10)), *said)
    mxfp4 = reader_of(folder(tmp_path / "b", mxfp4_parts(), None))
    said = ["'experts.up'", "model.safetensors", "MXFP4", "no quantization_config"]
    refused(lambda: mxfp4.read("experts.up", (3, 64, 5)), *said)
    crossed = reader_of(folder(tmp_path / "c", fp8_parts(), MXFP4))
    refused(lambda: crossed.read("x.weight", (7, 10)), "'x.weight'", "F8_E4M3")


def test_a_quantised_tensor_that_nobody_asked_for_is_left_over(tmp_path):
    reader = reader_of(folder(tmp_path, mxfp4_parts(), MXFP4))
    reader.read("experts.up_bias", (3, 5))
    refused(reader.finish, "1 tensors are of no use", "'experts.up'")


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"quant_method": "awq"}, ["'awq'", "fp8", "mxfp4"]),
        ({"quant_method": "compressed-tensors"}, ["'compressed-tensors'"]),
        ({"bits": 4}, ["quant_method None"]),
        ({**FP8, "weight_block_size": None}, ["weight_block_size None"]),
        ({**FP8, "weight_block_size": [128]}, ["weight_block_size [128]"]),
        ({**FP8, "weight_block_size": [0, 128]}, ["weight_block_size [0, 128]"]),
        ({**FP8, "fmt": "e5m2"}, ["fmt 'e5m2'", "'e4m3'"]),
        ({**FP8, "activation_scheme": "static"}, ["activation_scheme 'static'"]),
    ],
)
def test_what_is_not_implemented_is_named(tiny, settings, said):
    config = {**tiny.config, "quantization_config": settings}
    path = tiny.directory(config=config)
    refused(lambda: load(path), "config.json", "not implemented", *said)
    found = describe(path)
    assert not found.implemented
    for text in said:
        assert text in found.note


def test_a_setting_that_is_no_object(tiny):
    path = tiny.directory(config={**tiny.config, "quantization_config": "fp8"})
    refused(lambda: load(path), "config.json", "'fp8' is no object")


def test_the_setting_is_found_at_either_level():
    where = Path("config.json")
    assert scheme_of({}, where) is None
    assert scheme_of({"quantization_config": None}, where) is None
    for raw in (
        {"quantization_config": FP8, "text_config": {}},
        {"text_config": {"quantization_config": FP8}},
    ):
        scheme = scheme_of(raw, where)
        assert scheme is not None and scheme.name == "FP8"


ORACLES = Path(__file__).resolve().parents[1] / "data/oracles"


@pytest.mark.parametrize("name", ["deepseek_v3_fp8", "gpt_oss_mxfp4"])
def test_a_published_layout(name):
    """Every quantised tensor of a tiny checkpoint in the layout of a release."""
    reader = reader_of(ORACLES / name)
    assert isinstance(reader, QuantisedReader)
    stored = SafetensorsReader(ORACLES / name)
    joined = [i for i in reader.infos.values() if i.dtype in ("F8_E4M3", "MXFP4")]
    assert len(stored.infos) - len(reader.infos) == len(joined) > 5
    for info in joined:
        values = reader.read(info.name, info.shape)
        if info.dtype == "MXFP4":
            parts = [f"{info.name}{end}" for end in ("_blocks", "_scales")]
            codes, scales = (stored._mapped(stored.infos[part]) for part in parts)
            wanted = mxfp4_weight(codes, scales)
        else:
            parts = [info.name, f"{info.name}_scale_inv"]
            codes, scales = (stored._mapped(stored.infos[part]) for part in parts)
            wanted = fp8_weight(codes.view(np.uint8), scales, (32, 32))
        np.testing.assert_array_equal(values.astype(np.float64), wanted)
        assert np.isfinite(wanted).all() and np.abs(wanted).max() > 0.01
    with pytest.raises(CheckpointError, match=re.escape("are of no use")):
        reader.finish()  # the tensors that are not quantised have not been asked for
