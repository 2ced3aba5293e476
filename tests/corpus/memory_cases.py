from tests.corpus.case import Case


def cases() -> list[Case]:
    return []
