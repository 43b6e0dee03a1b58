"""The ledger of e-mails, and how they are sent."""
