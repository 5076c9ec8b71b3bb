"""Small third-party networks with random weights, from timm and transformers."""

from __future__ import annotations

import importlib.util
import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

import mpikfac
from mpikfac_apps.checking.model import Subject, subject_of
from support.torchvision import stand_in

PACKAGES = "timm", "transformers"
CLASSES = 5
WORDS = 23
TEXT = (6,)
IMAGE = (3, 32, 32)


@dataclass(frozen=True)
class Entry:
    """A network of the zoo.

    Attributes:
        build: returns the network, with random weights.
        inputs: the shape of an example.
        tokens: examples are integers below `tokens`; None for real inputs.
        positions: layers to skip, whose input has a row per position instead of per example.
    """

    build: Callable[[], nn.Module]
    inputs: tuple[int, ...] = IMAGE
    tokens: int | None = None
    positions: tuple[str, ...] = ()


class Adapted(nn.Module):
    """Wrap a network from transformers to take one tensor and return `[batch, classes, ...]`."""

    def __init__(self, network: nn.Module, run: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.network, self.run = network, run

    def forward(self, x: Tensor) -> Tensor:
        """Return the network's outputs, with the classes in dimension 1."""
        y = self.run(self.network, x)
        return y if y.dim() == 2 else y.movedim(-1, 1)


def missing() -> list[str]:
    """Return the packages that the zoo needs and that are not installed."""
    return [name for name in PACKAGES if importlib.util.find_spec(name) is None]


def asked(name: str) -> Subject:
    """Return a network of the zoo as a subject of `mpikfac check` that skips its `positions`."""
    entry = ZOO[name]
    torch.manual_seed(0)
    found = subject_of(entry.build(), mpikfac.KINDS, entry.inputs, entry.tokens)
    coverage = replace(found.coverage, skip=[*found.coverage.skip, *entry.positions])
    return replace(found, coverage=coverage)


@cache
def timm() -> Any:
    """Return timm, whether or not torchvision is installed."""
    with stand_in():
        return importlib.import_module("timm")


@cache
def transformers() -> Any:
    """Return transformers, configured to contact no server and to print no advice."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    found = importlib.import_module("transformers")
    logging.getLogger("transformers").setLevel(logging.ERROR)
    return found


# -- timm ----------------------------------------------------------------------------------------


def of_timm(name: str, **options: Any) -> Entry:
    """Return the entry of a timm network, made smaller by `options`."""
    return Entry(lambda: timm().create_model(name, num_classes=CLASSES, **options))


def regnet() -> nn.Module:
    """Return a RegNet with squeeze and excitation."""
    kinds = timm().models.regnet
    options = kinds.RegNetCfg(4, w0=8, wa=8.0, wm=1.7, group_size=8, se_ratio=0.25, stem_width=8)
    return kinds.RegNet(options, num_classes=CLASSES)


def mobilenetv3() -> nn.Module:
    """Return a MobileNetV3 with one block of every kind."""
    blocks = [["ds_r1_k3_s2_e1_c8_se0.25_nre"], ["ir_r1_k5_s2_e2_c16_se0.25"], ["cn_r1_k1_s1_c24"]]
    made = timm().models._efficientnet_builder.decode_arch_def(blocks)
    options = {"num_features": 32, "stem_size": 8, "num_classes": CLASSES}
    return timm().models.mobilenetv3.MobileNetV3(made, **options)


def mixer() -> nn.Module:
    """Return an MLP-Mixer; its head is initialised to zero."""
    options = {"img_size": 32, "patch_size": 8, "embed_dim": 16, "num_blocks": 2}
    return timm().models.mlp_mixer.MlpMixer(num_classes=CLASSES, **options)


def levit() -> nn.Module:
    """Return a LeViT that looks up its biases in every pass, because eval() caches a graph."""

    def look_up(attention: Any, device: object) -> Tensor:
        return attention.attention_biases[:, attention.attention_bias_idxs]

    options = {"embed_dim": (16, 32), "num_heads": (2, 4), "depth": (1, 1), "key_dim": 8}
    model = timm().create_model("levit_128s", num_classes=CLASSES, img_size=64, **options)
    for module in model.modules():
        if hasattr(module, "attention_bias_cache"):
            module.get_attention_biases = MethodType(look_up, module)
    return model


VIT = {"img_size": 32, "patch_size": 8, "embed_dim": 16, "depth": 2, "num_heads": 2}
SWIN = {"img_size": 32, "window_size": 4, "embed_dim": 8, "depths": (1, 2), "num_heads": (2, 2)}
OF_TIMM = {
    "resnet": of_timm("resnet18", layers=(1, 1, 1, 1), channels=(8, 8, 8, 8)),
    "regnet": Entry(regnet),
    "convnext": of_timm("convnext_atto", depths=(1, 1, 1, 1), dims=(8, 8, 8, 8)),
    "efficientnet": of_timm("test_efficientnet"),
    "mobilenetv3": Entry(mobilenetv3),
    "densenet": of_timm("densenet121", growth_rate=4, block_config=(2, 2)),
    "nfnet": of_timm("test_nfnet"),
    "vit": of_timm("vit_tiny_patch16_224", **VIT),
    "beit": of_timm("beit_base_patch16_224", **VIT),
    "swin": of_timm("swin_tiny_patch4_window7_224", **SWIN),
    "mixer": Entry(mixer),
    "levit": Entry(levit, (3, 64, 64)),
}


# -- transformers --------------------------------------------------------------------------------

SMALL = {
    **{"hidden_size": 16, "intermediate_size": 24, "max_position_embeddings": 16},
    **{"num_hidden_layers": 2, "num_attention_heads": 2},
    **{"pad_token_id": None, "bos_token_id": 1, "eos_token_id": 2},
}
GROUPED = {**SMALL, "num_key_value_heads": 1}
SIDES = {"layers": 1, "attention_heads": 2, "ffn_dim": 24}
BOTH_SIDES = {
    "d_model": 16,
    **{f"{side}_{name}": n for side in ("encoder", "decoder") for name, n in SIDES.items()},
}


def of_words(kind: str, head: str = "CausalLM", **options: Any) -> Entry:
    """Return the entry of a network that takes tokens."""

    def build() -> nn.Module:
        made = transformers().AutoConfig.for_model(kind, vocab_size=WORDS, **options)
        network = getattr(transformers(), f"AutoModelFor{head}").from_config(made)
        return Adapted(network, lambda n, x: n(input_ids=x).logits)

    return Entry(build, TEXT, WORDS)


def classifying(kind: str, **options: Any) -> Entry:
    """Return the entry of a network that takes tokens and returns a class."""
    return of_words(kind, "SequenceClassification", num_labels=CLASSES, **options)


def translating(kind: str, **options: Any) -> Entry:
    """Return the entry of an encoder-decoder; the decoder takes the tokens in reverse order."""

    def build() -> nn.Module:
        made = transformers().AutoConfig.for_model(kind, vocab_size=WORDS, **options)
        network = transformers().AutoModelForSeq2SeqLM.from_config(made)
        return Adapted(network, lambda n, x: n(input_ids=x, decoder_input_ids=x.flip(1)).logits)

    return Entry(build, TEXT, WORDS)


def vit() -> nn.Module:
    options = {**SMALL, "image_size": 32, "patch_size": 8, "num_labels": CLASSES}
    made = transformers().ViTConfig(**options)
    return Adapted(transformers().ViTForImageClassification(made), lambda n, x: n(x).logits)


def clip() -> nn.Module:
    """Return a CLIP that multiplies an image's features by those of tokens made from it."""
    words = {**SMALL, "vocab_size": WORDS}
    image = {**SMALL, "image_size": 32, "patch_size": 8}
    made = transformers().CLIPConfig(text_config=words, vision_config=image, projection_dim=8)

    def run(network: Any, x: Tensor) -> Tensor:
        both = network(input_ids=words_of(x[:, 0, 0, :6]), pixel_values=x)
        return both.image_embeds * both.text_embeds * network.logit_scale.exp()

    return Adapted(transformers().CLIPModel(made), run)


def whisper() -> nn.Module:
    """Return a Whisper that transcribes noise into tokens made from the noise."""
    options = {"num_mel_bins": 4, "max_source_positions": 8, "max_target_positions": 8}
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    made = transformers().WhisperConfig(vocab_size=WORDS, **BOTH_SIDES, **options, **tokens)
    network = transformers().WhisperForConditionalGeneration(made)
    return Adapted(
        network,
        lambda n, x: n(input_features=x, decoder_input_ids=words_of(x[:, 0, :4])).logits,
    )


def words_of(x: Tensor) -> Tensor:
    """Return tokens that depend on real inputs."""
    return (7 * x).abs().long() % WORDS


def wav2vec2() -> nn.Module:
    own = {name: value for name, value in SMALL.items() if name != "max_position_embeddings"}
    front = {"conv_dim": (8, 8), "conv_stride": (3, 2), "conv_kernel": (5, 3)}
    made = transformers().Wav2Vec2Config(
        **{**own, **front, "vocab_size": WORDS, "num_feat_extract_layers": 2},
        **{"num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2},
        **{"mask_time_prob": 0.0, "mask_feature_prob": 0.0, "layerdrop": 0.0},
    )
    return Adapted(transformers().Wav2Vec2ForCTC(made), lambda n, x: n(x).logits)


T5 = {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 1, "num_heads": 2}
DISTILBERT = {"dim": 16, "hidden_dim": 24, "n_layers": 1, "n_heads": 2}
EXPERTS = {"num_local_experts": 2, "experts_implementation": "eager"}
OF_TRANSFORMERS = {
    "bert": classifying("bert", **SMALL),
    "albert": classifying("albert", **SMALL, embedding_size=8),
    "distilbert": classifying("distilbert", **DISTILBERT, max_position_embeddings=16),
    "gpt2": of_words(
        "gpt2", n_embd=16, n_layer=2, n_head=2, n_positions=16, bos_token_id=1, eos_token_id=2
    ),
    "llama": of_words("llama", **GROUPED),
    "qwen2": of_words("qwen2", **GROUPED),
    "gemma": of_words("gemma", **GROUPED, head_dim=8),
    "mixtral": of_words("mixtral", **GROUPED, **EXPERTS),
    "opt": of_words("opt", **{**SMALL, "pad_token_id": 1}, ffn_dim=24, word_embed_proj_dim=16),
    "mamba": of_words("mamba", hidden_size=16, num_hidden_layers=1, state_size=4),
    "t5": translating("t5", **T5, decoder_start_token_id=0),
    "bart": translating("bart", **BOTH_SIDES, max_position_embeddings=16, pad_token_id=1),
    "vit": Entry(vit),
    "clip": Entry(clip),
    "whisper": Entry(whisper, (4, 16)),
    "wav2vec2": Entry(wav2vec2, (60,)),
}

BIAS = "block.0.layer.0.SelfAttention.relative_attention_bias"
POSITIONS = {
    "bert": ["bert.embeddings.position_embeddings"],
    "albert": ["albert.embeddings.position_embeddings"],
    "distilbert": ["distilbert.embeddings.position_embeddings"],
    "gpt2": ["transformer.wpe"],
    "t5": [f"{side}.{BIAS}" for side in ("encoder", "decoder")],
    "clip": [f"{side}_model.embeddings.position_embedding" for side in ("text", "vision")],
}
ZOO: Mapping[str, Entry] = {
    **{f"timm {name}": entry for name, entry in OF_TIMM.items()},
    **{
        f"transformers {name}": replace(
            entry, positions=tuple(f"network.{own}" for own in POSITIONS.get(name, ()))
        )
        for name, entry in OF_TRANSFORMERS.items()
    },
}
