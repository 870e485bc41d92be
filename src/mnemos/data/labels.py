"""The label of tokens that the loss ignores. A module of its own, because the processes that tokenise import no torch."""

IGNORED = -100  # the default ignore_index of torch's cross-entropy
