"""Says where workflows are now: stubs that were written before import them from here."""

raise ImportError(
    "thunderagent.workflows is a package of its own, thunderagent_workflows: install thunderagent with the extra "
    "`workflows`, change the import, and write stubs again by `thunderagent workflow stubs`"
)
