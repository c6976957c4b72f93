"""An OpenAI-compatible server; docs/serve.md says how it runs. Needs the extra `serve`."""
