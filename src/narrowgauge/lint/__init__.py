"""The linter: known pitfalls of mixed precision, found before anything runs.

``script.check`` checks a script without running it or importing torch. ``model.check`` checks modules, parameters,
optimizer and recipe. Avoiding false alarms matters as much as finding pitfalls: a rule that is not certain reports
nothing.

    script.py -> interpreter/ follows the script and reports every step to
                 rules/       detectors, which record verdicts (verdicts.py) that become findings
    model.py  -> rules/       checks of modules, parameters, optimizer and recipe
"""
