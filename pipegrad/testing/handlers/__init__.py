"""Is a handler right? `contract` is the test that every handler passes, `scenario` what it runs."""
