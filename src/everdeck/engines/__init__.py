"""How one worker is brought to life: where it runs. Today on this box (:mod:`everdeck.engines.local`)."""
