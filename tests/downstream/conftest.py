"""Frozen plugins are tested in processes of their own, as their authors would."""

collect_ignore_glob = ["contract_1/*", "before_kits/*"]
