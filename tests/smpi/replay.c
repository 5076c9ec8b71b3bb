/* Replay messages with MPI, and print the seconds of each message.
 *
 *     replay FILE
 *
 * The file has a message after the other, as words:
 *
 *     PRIMITIVE TEAMS           the collective, and the number of communicators
 *     FIRST STEP MEMBERS CALLS  for each team: its ranks, and its calls of the primitive in turn
 *     WORDS NUMBER...           for each call: as many numbers as the primitive takes
 *
 * Numbers are elements of 4 bytes. Allreduce: elements. Reduce, Bcast: root, elements.
 * Reduce_scatter, Allgatherv, Alltoall: elements of each member's part. "Isend,Irecv": source,
 * destination and elements of each transfer. "Allgatherv,ring" and "Bcast,knomial" are made here of
 * sends, as SMPI lacks these algorithms.
 *
 * All teams of a message start together, after a barrier. The seconds are those from the start of
 * the last rank to the end of the last rank.
 */

#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define RADIX 4 /* of Open MPI's tree */

struct call {
    int words;
    int *numbers;
};

struct team {
    int first, step, members, calls;
    struct call *call;
};

static int number(FILE *file) {
    int value;
    if (fscanf(file, "%d", &value) != 1) {
        fprintf(stderr, "the file ends in a message\n");
        MPI_Abort(MPI_COMM_WORLD, 2);
    }
    return value;
}

static void *space(size_t bytes) {
    void *new = calloc(bytes ? bytes : 1, 1);
    if (!new) {
        fprintf(stderr, "no memory for %zu bytes\n", bytes);
        MPI_Abort(MPI_COMM_WORLD, 2);
    }
    return new;
}

static struct team read_team(FILE *file) {
    struct team team;
    team.first = number(file);
    team.step = number(file);
    team.members = number(file);
    team.calls = number(file);
    team.call = space(sizeof(struct call) * (size_t)team.calls);
    for (int c = 0; c < team.calls; c++) {
        struct call *call = &team.call[c];
        call->words = number(file);
        call->numbers = space(sizeof(int) * (size_t)call->words);
        for (int w = 0; w < call->words; w++)
            call->numbers[w] = number(file);
    }
    return team;
}

static void free_team(struct team *team) {
    for (int c = 0; c < team->calls; c++)
        free(team->call[c].numbers);
    free(team->call);
}

static int contains(const struct team *team, int rank) {
    int place = (rank - team->first) / team->step;
    return rank >= team->first && (rank - team->first) % team->step == 0 && place < team->members;
}

static void transfer(const struct call *call, float *sent, float *received, MPI_Comm comm) {
    int rank, requests = 0;
    MPI_Comm_rank(comm, &rank);
    MPI_Request *request = space(sizeof(MPI_Request) * (size_t)call->words);
    for (int w = 0; w < call->words; w += 3) {
        int *of = &call->numbers[w];
        if (of[1] == rank)
            MPI_Irecv(received, of[2], MPI_FLOAT, of[0], 0, comm, &request[requests++]);
    }
    for (int w = 0; w < call->words; w += 3) {
        int *of = &call->numbers[w];
        if (of[0] == rank)
            MPI_Isend(sent, of[2], MPI_FLOAT, of[1], 0, comm, &request[requests++]);
    }
    MPI_Waitall(requests, request, MPI_STATUSES_IGNORE);
    free(request);
}

/* Return the elements of all parts; set `places` to the first element of each part. */
static int places_of(const struct call *call, int *places) {
    int all = 0;
    for (int w = 0; w < call->words; w++) {
        places[w] = all;
        all += call->numbers[w];
    }
    return all;
}

static void alltoall(const struct call *call, float *sent, float *received, MPI_Comm comm) {
    int rank, size;
    MPI_Comm_rank(comm, &rank);
    MPI_Comm_size(comm, &size);
    int *places = space(sizeof(int) * (size_t)size), *own = space(sizeof(int) * (size_t)size);
    int *at = space(sizeof(int) * (size_t)size);
    places_of(call, places);
    for (int member = 0; member < size; member++) {
        own[member] = call->numbers[rank];
        at[member] = member * own[member];
    }
    MPI_Alltoallv(sent, call->numbers, places, MPI_FLOAT, received, own, at, MPI_FLOAT, comm);
    free(places);
    free(own);
    free(at);
}

/* Pass all parts on to the next member, part after part. */
static void ring(const struct call *call, float *buffer, MPI_Comm comm) {
    int rank, size;
    MPI_Comm_rank(comm, &rank);
    MPI_Comm_size(comm, &size);
    int *places = space(sizeof(int) * (size_t)size), *n = call->numbers;
    int next = (rank + 1) % size, before = (rank + size - 1) % size;
    places_of(call, places);
    for (int step = 0; step < size - 1; step++) {
        int out = (rank + size - step) % size, in = (rank + size - step - 1) % size;
        MPI_Sendrecv(buffer + places[out], n[out], MPI_FLOAT, next, 0, buffer + places[in], n[in],
                     MPI_FLOAT, before, 0, comm, MPI_STATUS_IGNORE);
    }
    free(places);
}

/* Copy along a tree in which a member has RADIX - 1 children at each distance 1, RADIX, ... */
static void knomial(const struct call *call, float *buffer, MPI_Comm comm) {
    int rank, size, requests = 0, root = call->numbers[0], count = call->numbers[1], distance = 1;
    MPI_Request request[32 * RADIX];
    MPI_Comm_rank(comm, &rank);
    MPI_Comm_size(comm, &size);
    int place = (rank - root + size) % size;
    while (distance < size && place % (distance * RADIX) == 0)
        distance *= RADIX;
    if (place) {
        int parent = place - place % (distance * RADIX);
        MPI_Recv(buffer, count, MPI_FLOAT, (parent + root) % size, 0, comm, MPI_STATUS_IGNORE);
    }
    for (distance /= RADIX; distance > 0; distance /= RADIX)
        for (int child = place + distance; child < place + RADIX * distance; child += distance)
            if (child < size)
                MPI_Isend(buffer, count, MPI_FLOAT, (child + root) % size, 0, comm,
                          &request[requests++]);
    MPI_Waitall(requests, request, MPI_STATUSES_IGNORE);
}

static void carry_out(const char *primitive, const struct call *call, MPI_Comm comm) {
    int rank, size, elements = 0, *n = call->numbers;
    MPI_Comm_rank(comm, &rank);
    MPI_Comm_size(comm, &size);
    for (int w = 0; w < call->words; w++)
        elements += n[w];
    int room = elements;
    if (!strcmp(primitive, "Alltoall") && size * n[rank] > room)
        room = size * n[rank];
    float *sent = space(sizeof(float) * (size_t)room);
    float *received = space(sizeof(float) * (size_t)room);
    if (!strcmp(primitive, "Allreduce")) {
        MPI_Allreduce(sent, received, n[0], MPI_FLOAT, MPI_SUM, comm);
    } else if (!strcmp(primitive, "Reduce")) {
        MPI_Reduce(sent, received, n[1], MPI_FLOAT, MPI_SUM, n[0], comm);
    } else if (!strcmp(primitive, "Bcast")) {
        MPI_Bcast(sent, n[1], MPI_FLOAT, n[0], comm);
    } else if (!strcmp(primitive, "Reduce_scatter")) {
        MPI_Reduce_scatter(sent, received, n, MPI_FLOAT, MPI_SUM, comm);
    } else if (!strcmp(primitive, "Allgatherv")) {
        int *places = space(sizeof(int) * (size_t)size);
        places_of(call, places);
        MPI_Allgatherv(sent, n[rank], MPI_FLOAT, received, n, places, MPI_FLOAT, comm);
        free(places);
    } else if (!strcmp(primitive, "Allgatherv,ring")) {
        ring(call, received, comm);
    } else if (!strcmp(primitive, "Bcast,knomial")) {
        knomial(call, received, comm);
    } else if (!strcmp(primitive, "Alltoall")) {
        alltoall(call, sent, received, comm);
    } else if (!strcmp(primitive, "Isend,Irecv")) {
        transfer(call, sent, received, comm);
    } else {
        fprintf(stderr, "%s is no primitive\n", primitive);
        MPI_Abort(MPI_COMM_WORLD, 2);
    }
    free(sent);
    free(received);
}

static double seconds_of(const char *primitive, const struct team *mine, MPI_Comm comm) {
    double span[2], last[2];
    MPI_Barrier(MPI_COMM_WORLD);
    span[0] = MPI_Wtime();
    for (int c = 0; mine && c < mine->calls; c++)
        carry_out(primitive, &mine->call[c], comm);
    span[1] = MPI_Wtime();
    MPI_Allreduce(span, last, 2, MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD);
    return last[1] - last[0];
}

int main(int argc, char **argv) {
    int rank;
    char primitive[32];
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    FILE *file = argc == 2 ? fopen(argv[1], "r") : NULL;
    if (!file) {
        fprintf(stderr, "usage: replay FILE\n");
        MPI_Abort(MPI_COMM_WORLD, 2);
    }
    while (fscanf(file, "%31s", primitive) == 1) {
        struct team mine, other;
        int found = 0, teams = number(file), colour = MPI_UNDEFINED;
        MPI_Comm comm;
        for (int t = 0; t < teams; t++) {
            other = read_team(file);
            if (contains(&other, rank)) {
                mine = other;
                colour = t;
                found = 1;
            } else {
                free_team(&other);
            }
        }
        MPI_Comm_split(MPI_COMM_WORLD, colour, rank, &comm);
        double seconds = seconds_of(primitive, found ? &mine : NULL, comm);
        if (rank == 0)
            printf("%.9f\n", seconds);
        if (found) {
            MPI_Comm_free(&comm);
            free_team(&mine);
        }
    }
    fclose(file);
    MPI_Finalize();
    return 0;
}
