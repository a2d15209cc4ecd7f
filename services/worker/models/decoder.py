"""One decoder for the whole Llama family: what differs between its members is in ``ModelConfig``.

Weights carry their Hugging Face names until they are copied into the fused tensors the forward pass uses (queries,
keys and values in one product, gate and up in one).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from kernels.decoder import Batch, DecoderParts, FusedDecoder, LayerParts
from kernels.ops import Kernels
from kernels.quantized import QuantizedWeight
from services.worker.models.config import ModelConfig
from services.worker.quantization import quantize
from shared.errors import ConfigError


class Linear:
    """``x @ weight.T + bias``; weight [out, in], uninitialised until it is loaded, then packed."""

    def __init__(self, inputs: int, outputs: int, bias: bool, dtype: torch.dtype, device: torch.device) -> None:
        self.weight = torch.empty(outputs, inputs, dtype=dtype, device=device)
        self.bias = torch.empty(outputs, dtype=dtype, device=device) if bias else None
        self.blocks: dict[int, QuantizedWeight] = {}
        """By their first row: rows that were loaded quantised, and are not in ``weight``."""

    def pack(self, kernels: Kernels, quantization: str, *, head: bool = False) -> None:
        """Hands the loaded weight to the kernels, which may keep a copy in another order: ours is let go."""
        dtype = self.weight.dtype
        weight = self._joined() or quantize(self.weight, quantization, head=head)
        if isinstance(weight, QuantizedWeight):
            self.product = kernels.quantized_linear(weight, self.bias, dtype)
        else:
            self.product = kernels.linear(weight, self.bias)
        del self.weight, self.blocks

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.product(x)

    def _joined(self) -> QuantizedWeight | None:
        """The whole weight, if all its rows were loaded quantised; else those that were are dequantised into it."""
        parts = [self.blocks[first] for first in sorted(self.blocks)]
        if parts and sum(len(part.codes) for part in parts) == len(self.weight):
            return QuantizedWeight.stacked(parts)
        for first, part in self.blocks.items():
            self.weight[first : first + len(part.codes)] = part.dequantize(self.weight.dtype)
        return None


@dataclass(frozen=True)
class Place:
    """Where a weight is loaded to: a tensor; and what comes quantised stays so in rows ``first``, ... of ``linear``."""

    tensor: torch.Tensor
    linear: Linear | None = None
    first: int = 0
    looked_up: bool = False
    """The tensor is needed beside the linear layer."""

    def load(self, weight: torch.Tensor | QuantizedWeight) -> None:
        if not isinstance(weight, QuantizedWeight):
            self.tensor.copy_(weight)
            return
        if self.linear is not None:
            self.linear.blocks[self.first] = weight
        if self.linear is None or self.looked_up:
            self.tensor.copy_(weight.dequantize(self.tensor.dtype))


class Layer:
    def __init__(
        self, config: ModelConfig, index: int, dtype: torch.dtype, device: torch.device, kernels: Kernels
    ) -> None:
        self.config = config
        self.kernels = kernels
        self.window = config.windows[index]
        hidden, head_dim = config.hidden_size, config.head_dim
        self.q_size, self.kv_size = config.num_heads * head_dim, config.num_kv_heads * head_dim
        self.input_norm = torch.empty(hidden, dtype=dtype, device=device)
        self.post_norm = torch.empty(hidden, dtype=dtype, device=device)
        self.qkv = Linear(hidden, self.q_size + 2 * self.kv_size, config.qkv_bias, dtype, device)
        self.out = Linear(self.q_size, hidden, config.out_bias, dtype, device)
        self.gate_up = Linear(hidden, 2 * config.intermediate_size, config.mlp_bias, dtype, device)
        self.down = Linear(config.intermediate_size, hidden, config.mlp_bias, dtype, device)
        self.q_norm = torch.empty(head_dim, dtype=dtype, device=device) if config.qk_norm else None
        self.k_norm = torch.empty(head_dim, dtype=dtype, device=device) if config.qk_norm else None

    def parameters(self) -> dict[str, Place]:
        """Hugging Face name (after ``model.layers.N.``) to where it is loaded."""
        norms = {"input_layernorm": self.input_norm, "post_attention_layernorm": self.post_norm}
        if self.q_norm is not None and self.k_norm is not None:
            norms |= {"self_attn.q_norm": self.q_norm, "self_attn.k_norm": self.k_norm}
        found = {f"{name}.weight": Place(tensor) for name, tensor in norms.items()}
        kv_size, inner = self.kv_size, self.config.intermediate_size
        fused: list[tuple[Linear, dict[str, int]]] = [
            (self.qkv, {"self_attn.q_proj": self.q_size, "self_attn.k_proj": kv_size, "self_attn.v_proj": kv_size}),
            (self.out, {"self_attn.o_proj": len(self.out.weight)}),
            (self.gate_up, {"mlp.gate_proj": inner, "mlp.up_proj": inner}),
            (self.down, {"mlp.down_proj": len(self.down.weight)}),
        ]
        for linear, parts in fused:
            first = 0
            for name, rows in parts.items():
                found[f"{name}.weight"] = Place(linear.weight[first : first + rows], linear, first)
                if linear.bias is not None:
                    found[f"{name}.bias"] = Place(linear.bias[first : first + rows])
                first += rows
        return found

    def pack(self, quantization: str) -> None:
        for linear in (self.qkv, self.out, self.gate_up, self.down):
            linear.pack(self.kernels, quantization)

    def parts(self) -> LayerParts:
        return LayerParts(
            input_norm=self.input_norm,
            post_norm=self.post_norm,
            q_norm=self.q_norm,
            k_norm=self.k_norm,
            qkv=self.qkv.product,
            out=self.out.product,
            gate_up=self.gate_up.product,
            down=self.down.product,
            window=self.window,
        )

    def attend(self, x: torch.Tensor, batch: Batch, kv: torch.Tensor, cos_sin: torch.Tensor) -> torch.Tensor:
        """Self-attention of normed ``x [T, hidden]``; stores the new keys and values first."""
        config, ops = self.config, self.kernels
        qkv = self.qkv(x).view(len(x), -1, config.head_dim)
        q, k, _ = torch.split(qkv, [config.num_heads, config.num_kv_heads, config.num_kv_heads], dim=1)
        if self.q_norm is not None and self.k_norm is not None:
            q.copy_(ops.rms_norm(q, self.q_norm, config.rms_norm_eps))
            k.copy_(ops.rms_norm(k, self.k_norm, config.rms_norm_eps))
        ops.rope_store(qkv, kv, cos_sin, batch.positions, batch.slot_mapping)
        scale, decodes = config.head_dim**-0.5, len(batch.decode_lens)
        parts = []
        if decodes:
            parts.append(
                ops.paged_decode(
                    q[:decodes], kv, batch.decode_tables, batch.decode_lens, scale=scale, window=self.window
                )
            )
        if decodes < len(x):
            parts.append(
                ops.paged_prefill(
                    q[decodes:],
                    kv,
                    batch.chunk_tables,
                    batch.chunk_cu_seqlens,
                    batch.chunk_lens,
                    scale=scale,
                    window=self.window,
                )
            )
        attended = parts[0] if len(parts) == 1 else torch.cat(parts)
        return self.out(attended.reshape(len(x), -1))

    def transform(self, x: torch.Tensor) -> torch.Tensor:
        """The gated feed-forward of normed ``x [T, hidden]``."""
        return self.down(self.kernels.silu_mul(self.gate_up(x)))


class Decoder:
    """Weights of one model and its forward pass over paged KV."""

    def __init__(
        self,
        config: ModelConfig,
        max_model_len: int,
        dtype: torch.dtype,
        device: torch.device,
        kernels: Kernels,
        quantization: str = "none",
    ) -> None:
        """quantization: of weights that are not quantised when they are loaded, as ``quantize`` has it."""
        self.config = config
        self.kernels = kernels
        self.quantization = quantization
        self.embedding = torch.empty(config.vocab_size, config.hidden_size, dtype=dtype, device=device)
        self.layers = [Layer(config, index, dtype, device, kernels) for index in range(config.num_layers)]
        self.norm = torch.empty(config.hidden_size, dtype=dtype, device=device)
        self.head = Linear(config.hidden_size, config.vocab_size, False, dtype, device)
        if config.tied:
            self.head.weight = self.embedding
        self.cos_sin = config.rope.table(max_model_len).to(device)
        self.fused: FusedDecoder | None = None

    def load(self, weights: Iterable[tuple[str, torch.Tensor | QuantizedWeight]]) -> None:
        """Takes every weight to its place. Raises ConfigError naming one that is missing, unknown or misshapen."""
        places = self._parameters()
        missing = set(places)
        for name, weight in weights:
            if name.endswith("rotary_emb.inv_freq") or (self.config.tied and name == "lm_head.weight"):
                continue  # derived from config.json; a second copy of the embedding
            place = places.get(name)
            if place is None:
                raise ConfigError(f"the weights hold {name}, which a {self.config.architecture} does not have")
            shape = place.tensor.shape
            if weight.shape != shape:
                raise ConfigError(f"{name} has shape {tuple(weight.shape)}; config.json makes it {tuple(shape)}")
            place.load(weight)
            missing.discard(name)
        if missing:
            first = min(missing)
            more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            raise ConfigError(f"the weights lack {first}{more}")
        for layer in self.layers:
            layer.pack(self.quantization)
        self.head.pack(self.kernels, self.quantization, head=True)
        self.fused = self.kernels.decoder(self._parts())

    def step(
        self, batch: Batch, kv: list[torch.Tensor], samples: torch.Tensor, likeliest: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, dict[str, float]]:
        """Logits [len(samples), vocab_size] of rows ``samples`` (int64) of the batch, whose keys and values are stored
        in ``kv``; and seconds by part where the kernels measure them. likeliest, [len(samples)] int64, gets the ids of
        their largest logits."""
        if self.fused is not None and self.fused.takes(kv[0]):
            return self.fused(batch, kv, samples, likeliest)
        logits = self.logits(self.forward(batch, kv)[samples])
        if likeliest is not None:
            torch.argmax(logits, dim=-1, out=likeliest)
        return logits, {}

    def forward(self, batch: Batch, kv: list[torch.Tensor]) -> torch.Tensor:
        """Hidden states [T, hidden] before the last norm; new keys and values are stored in ``kv`` (one a layer)."""
        ops, eps = self.kernels, self.config.rms_norm_eps
        residual = self.embedding[batch.tokens]
        x = ops.rms_norm(residual, self.layers[0].input_norm, eps)
        for index, layer in enumerate(self.layers):
            attended = layer.attend(x, batch, kv[index], self.cos_sin)
            x = ops.add_rms_norm(attended, residual, layer.post_norm, eps)
            transformed = layer.transform(x)
            if index + 1 < len(self.layers):
                x = ops.add_rms_norm(transformed, residual, self.layers[index + 1].input_norm, eps)
            else:
                residual += transformed
        return residual

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[rows, vocab_size] of the given rows of ``forward``'s result."""
        return self.head(self.kernels.rms_norm(hidden, self.norm, self.config.rms_norm_eps))

    def _parts(self) -> DecoderParts:
        config = self.config
        return DecoderParts(
            layers=[layer.parts() for layer in self.layers],
            embedding=self.embedding,
            norm=self.norm,
            head=self.head.product,
            cos_sin=self.cos_sin,
            heads=config.num_heads,
            kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            eps=config.rms_norm_eps,
            scale=config.head_dim**-0.5,
        )

    def _parameters(self) -> dict[str, Place]:
        tied = self.head if self.config.tied else None
        found = {
            "model.embed_tokens.weight": Place(self.embedding, tied, looked_up=True),
            "model.norm.weight": Place(self.norm),
        }
        if not self.config.tied:
            found["lm_head.weight"] = Place(self.head.weight, self.head)
        for index, layer in enumerate(self.layers):
            found |= {f"model.layers.{index}.{name}": place for name, place in layer.parameters().items()}
        return found
