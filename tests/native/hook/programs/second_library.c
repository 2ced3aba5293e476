const char* cudnnCreate(void) {
    return "second";
}
const char* cuOther(void) {
    return "second";
}
