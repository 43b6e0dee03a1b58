"""What the command lines of both programs share: answers, exit codes, diagnosis, the record of changes."""
