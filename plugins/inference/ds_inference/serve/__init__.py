"""``dscore serve``: a model behind HTTP, in OpenAI's protocol of completions and chat.

`protocol` reads requests, `answers` writes what is said back, `text` makes text of tokens, `worker`
owns the generator in a thread of its own, `app` has the routes, `connections` and `server` what
concerns sockets and signals, `model` opens a folder.
"""
