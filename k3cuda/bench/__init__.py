"""Load on a server or on an open model, and what comes of the times: needs no GPU and no package of `serve`."""
