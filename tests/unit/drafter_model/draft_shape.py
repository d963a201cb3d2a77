"""The small drafter that these tests build."""

SHAPE = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "intermediate_size": 24,
    "vocab_size": 50,
    "draft_vocab_size": 50,
    "block_size": 4,
    "mask_token_id": 3,
    "target_layer_ids": (0, 2),
    "num_target_layers": 4,
    "target_hidden_size": 16,
    "markov_rank": 5,
    "enable_confidence_head": True,
}
