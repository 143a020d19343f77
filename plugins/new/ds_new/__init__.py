"""``dscore new plugin``: a new distribution for ds_core, of any kind, from templates.

`kinds.KINDS` says what there is; ``templates/KIND`` has the files of a kind, ``templates/common``
those of all. The recipes in docs/plugins are these templates, rendered.
"""
