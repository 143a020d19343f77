"""Lets the served GPT go on with a text, and shows it as it is written:

python examples/serve/talk.py "The statement "
"""

from __future__ import annotations

import argparse

from openai import APIConnectionError, OpenAI


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("text", help="what it goes on with")
    parser.add_argument(
        "--tokens", type=int, default=40, help="how long; the text and this are 64 at most"
    )
    parser.add_argument("--server", default="http://127.0.0.1:8000/v1")
    args = parser.parse_args()
    # a minute: it may load yet
    with OpenAI(base_url=args.server, api_key="none", max_retries=10) as client:
        try:
            answer = client.completions.create(
                model="gpt", prompt=args.text, max_tokens=args.tokens, temperature=0.7, stream=True
            )
        except APIConnectionError:
            raise SystemExit(
                f"no server at {args.server}; start it: python examples/serve/serve.py"
            ) from None
        print(args.text, end="")
        for chunk in answer:
            print(chunk.choices[0].text, end="", flush=True)
        print()


if __name__ == "__main__":
    main()
