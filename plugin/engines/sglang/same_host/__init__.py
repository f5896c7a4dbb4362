"""kvarena's same-host transfers behind SGLang's Mooncake engine object (``KVARENA_SAME_HOST=1``)."""
