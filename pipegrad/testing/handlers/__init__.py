"""Is a handler right? `contract` has the checks, `rehearsed` and `scenario` run the handler."""
