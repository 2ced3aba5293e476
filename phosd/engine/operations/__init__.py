"""Operations on programs, one module for each protocol of docs/design/protocols.md."""
