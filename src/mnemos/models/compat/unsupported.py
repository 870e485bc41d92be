"""Keywords that other implementations have and this one lacks, each with the reason. Values listed as off are accepted."""

from __future__ import annotations

from ..keywords import Unsupported

ONE_ATTENTION = "attention always runs through torch's scaled_dot_product_attention"
ONE_SCAN = "the scan is chosen by backend, and every backend gives the same results"
LEARNED = "this gate is always a function of the token; retain='fixed' learns one number per head instead"
STRUCTURE = "register the network with mnemos.memory.register_module or register_structure and name it as structure"
TRAINING = "it belongs to training; see `mnemos train --help`"
NESTED = "give its fields to the config itself, such as num_heads, window_size, num_memory_layers, use_momentum"
ANY_LENGTH = "a model reads sequences of any length; leave it out"

MEMORY = {
    "batch_size": Unsupported("chunk_size alone sets where gradients are taken", (None,)),
    "model": Unsupported(STRUCTURE, (None,)),
    "store_memory_loss_fn": Unsupported("register the loss with mnemos.memory.register_loss and name it as objective"),
    "adaptive_step_transform": Unsupported("the learning rate is max_lr times a sigmoid", (None,)),
    "default_step_transform_max_lr": Unsupported(
        "learning rates have another scale here; give max_lr, or leave it out for the largest stable rate"
    ),
    "per_parameter_lr_modulation": Unsupported("every map of a head has the same learning rate", (False,)),
    "max_mem_layer_modulation": Unsupported("every map of a head has the same learning rate", (1.0, 1)),
    "per_head_learned_parameters": Unsupported("every head learns its own initial weights", (True,)),
    "attn_pool_chunks": Unsupported("gates are per token, not per chunk", (False,)),
    "momentum_order": Unsupported("momentum is of the first order", (1,)),
    "learned_momentum_combine": Unsupported("momentum is of the first order", (False,)),
    "learned_combine_include_zeroth": Unsupported("momentum is of the first order", (False,)),
    "qkv_receives_diff_views": Unsupported("give the input of keys and values as kv in the call", (False,)),
    "pre_rmsnorm": Unsupported("the blocks of a model normalise the input of a memory", (False,)),
    "post_rmsnorm": Unsupported("the output of a read is always normalised", (True,)),
    "use_accelerated_scan": Unsupported(ONE_SCAN, (False,)),
    "init_adaptive_step_bias": Unsupported("give lr_init, the initial learning rate itself", (None,)),
    "init_momentum_bias": Unsupported("give momentum_init, the initial momentum itself", (None,)),
    "init_decay_bias": Unsupported("give retain_init, one minus the initial decay", (None,)),
    "accept_weight_residual": Unsupported("a memory does not read the weights of another layer", (False,)),
    "gated_transition": Unsupported("chunks continue from each other without a gate", (False,)),
    "mem_model_norm_add_residual": Unsupported("give residual=True for a residual around the memory network"),
    "default_model_kwargs": Unsupported("give depth and expansion"),
    "activation": Unsupported("memory networks use GELU", (None, "gelu")),
    "learnable_lr": Unsupported("the learning rate is always a function of the token", (True,)),
    "learnable_momentum": Unsupported("momentum is always a function of the token, or off", (True,)),
    "learnable_forget": Unsupported(LEARNED, (True,)),
    "token_level_params": Unsupported("gates are per token, not per chunk", (True,)),
    "use_weight_decay": Unsupported("the forget gate is the weight decay; give use_forget_gate=False", (True,)),
    "use_layer_norm": Unsupported("the output of a read is always normalised", (True,)),
}

TRANSFORMER = {
    "neural_memory_segment_len": Unsupported("give neural_memory_kwargs=dict(chunk_size=...)", (None,)),
    "neural_mem_gate_attn_output": Unsupported("choose how memory and attention join by gate_mode", (False,)),
    "neural_memory_add_value_residual": Unsupported("layers do not share values", (False,)),
    "neural_memory_batch_size": Unsupported("give neural_memory_kwargs=dict(chunk_size=...)", (None,)),
    "neural_memory_qkv_receives_diff_views": Unsupported("queries, keys and values have the same input", (False,)),
    "num_residual_streams": Unsupported("hyper-connections are not implemented; there is one residual stream", (1,)),
    "neural_memory_model": Unsupported(STRUCTURE, (None,)),
    "use_flex_attn": Unsupported(ONE_ATTENTION, (False,)),
    "sliding_window_attn": Unsupported("MAC attends within segments; MAG and MAL have a sliding window", (False,)),
    "neural_mem_weight_residual": Unsupported("a memory does not read the weights of another layer", (False,)),
    "token_emb": Unsupported("set it later by model.set_input_embeddings(module)", (None,)),
}

CONFIG = {
    "memory": Unsupported(NESTED),
    "attention": Unsupported(NESTED),
    "max_seq_len": Unsupported(ANY_LENGTH),
    "max_seq_length": Unsupported(ANY_LENGTH),
    "ffn_activation": Unsupported("feed-forward layers are SwiGLU", ("silu",)),
    "attention_dropout": Unsupported("dropout applies to the output of every block", (0.0, 0)),
    "use_flash_attention": Unsupported(f"{ONE_ATTENTION}, which picks flash kernels itself", (True,)),
    "use_rotary_embeddings": Unsupported("attention always has rotary embeddings", (True,)),
    "activation": MEMORY["activation"],
    "learnable_lr": MEMORY["learnable_lr"],
    "learnable_momentum": MEMORY["learnable_momentum"],
    "learnable_forget": MEMORY["learnable_forget"],
    "token_level_params": MEMORY["token_level_params"],
    "use_weight_decay": MEMORY["use_weight_decay"],
    "use_layer_norm": MEMORY["use_layer_norm"],
    "batch_size": Unsupported(TRAINING),
    "learning_rate": Unsupported(TRAINING),
    "weight_decay": Unsupported(TRAINING),
    "warmup_steps": Unsupported(TRAINING),
    "max_steps": Unsupported(TRAINING),
}
ATLAS_CONFIG = CONFIG | {
    "learnable_taylor_coeffs": Unsupported(
        "the coefficients of the kernel are always learned; freeze the parameters named log_coefficients instead",
        (True,),
    ),
}

MEMORY_CALL = {
    "prev_weights": Unsupported("a memory does not read the weights of another layer", (None,)),
    "ttt_batch_size": Unsupported("chunk_size alone sets where gradients are taken", (None,)),
}
MODEL_CALL = {
    "return_loss_breakdown": Unsupported("there is one loss", (False,)),
    "disable_flex_attn": Unsupported(ONE_ATTENTION, (False, True)),
    "factorized_pos_emb": Unsupported("positions are rotary embeddings inside attention", (None,)),
    "cache": Unsupported("give it as past_key_values", (None,)),
    "return_cache": Unsupported("give use_cache=True; the output has it as past_key_values", (False,)),
}
SAMPLE = {
    "filter_fn": Unsupported("give min_p, top_k or top_p instead", (None,)),
    "show_progress": Unsupported("there is no progress bar", (False,)),
}
