"""Keys for signatures."""

from pathlib import Path

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec


def keys(folder: Path, name: str, password: str | None = None) -> tuple[Path, Path]:
    """The files of a new private key, encrypted if it has a password, and of its public one."""
    key = ec.generate_private_key(ec.SECP256R1())
    private, public = folder / f"{name}.pem", folder / f"{name}.pub"
    kind = serialization.PrivateFormat.PKCS8
    closed = serialization.BestAvailableEncryption(password.encode()) if password else serialization.NoEncryption()
    private.write_bytes(key.private_bytes(serialization.Encoding.PEM, kind, closed))
    info = serialization.PublicFormat.SubjectPublicKeyInfo
    public.write_bytes(key.public_key().public_bytes(serialization.Encoding.PEM, info))
    return private, public
