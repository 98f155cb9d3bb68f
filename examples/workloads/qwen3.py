"""Shapes of Qwen3-4B, for weights that are random: 8.04 GB in bfloat16. A small one of the same make for trying things.

The names and sizes are those of the model's safetensors files: what serving engines load and then merge.
"""

# Layers, width, width of the MLP, query heads, key/value heads, width of a head, vocabulary.
SIZES = {"full": (36, 2560, 9728, 32, 8, 128, 151936), "small": (2, 64, 128, 4, 2, 16, 512)}

# What an engine merges: the name in it, and the names in the file.
MERGED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}


def weights(scale):
    """Name and shape of each tensor, in the order of the file. The output layer is the embedding's."""
    layers, width, mlp, heads, kv_heads, head, vocabulary = SIZES[scale]
    yield "model.embed_tokens.weight", (vocabulary, width)
    for layer in range(layers):
        prefix = f"model.layers.{layer}"
        yield f"{prefix}.input_layernorm.weight", (width,)
        yield f"{prefix}.self_attn.q_proj.weight", (heads * head, width)
        yield f"{prefix}.self_attn.k_proj.weight", (kv_heads * head, width)
        yield f"{prefix}.self_attn.v_proj.weight", (kv_heads * head, width)
        yield f"{prefix}.self_attn.q_norm.weight", (head,)
        yield f"{prefix}.self_attn.k_norm.weight", (head,)
        yield f"{prefix}.self_attn.o_proj.weight", (width, heads * head)
        yield f"{prefix}.post_attention_layernorm.weight", (width,)
        yield f"{prefix}.mlp.gate_proj.weight", (mlp, width)
        yield f"{prefix}.mlp.up_proj.weight", (mlp, width)
        yield f"{prefix}.mlp.down_proj.weight", (width, mlp)
    yield "model.norm.weight", (width,)
