"""Floor 7: channels with members, rules and history that survive."""
