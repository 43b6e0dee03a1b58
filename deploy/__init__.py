"""How the service is run: on this machine, in containers, on Kubernetes."""
