"""The round and its loop: propose, verify, accept, cut, commit, observe."""
