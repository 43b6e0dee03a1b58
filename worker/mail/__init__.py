"""The ledger of e-mails, and how they are composed and sent."""
